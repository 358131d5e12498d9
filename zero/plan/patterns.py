"""How the configuration names modules: by class or by a pattern on their path."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence


def hits(patterns: Iterable[str], kind: str, path: str) -> list[str]:
    """The patterns that name a module of class `kind` at `path`; fnmatch on the path, which the root has none of."""
    return [pattern for pattern in patterns if pattern == kind or (path and fnmatch.fnmatchcase(path, pattern))]


def unmatched(where: str, patterns: Iterable[str], kinds: Iterable[str], paths: Sequence[str] = ()) -> ValueError:
    """The error of patterns at the JSON path `where` that name nothing; there are these classes and paths."""
    missing, classes = sorted(patterns), sorted(set(kinds))
    hints = [difflib.get_close_matches(pattern, [*classes, *paths], 1) for pattern in missing]
    near = "".join(f"; did you mean '{hint[0]}'?" for hint in hints if hint) or "."
    return ValueError(f"{where}: {missing} match no module of the model{near} Its classes are {classes}.")


def outermost(where: str, modules: Sequence[tuple[str, str]], patterns: Sequence[str]) -> list[str]:
    """The paths of the modules that `patterns` name and that lie in no other such; in the order given.

    `modules` are (path, class), parents before children. Raises ValueError for a pattern that names none.
    """
    missing, paths = set(patterns), []
    for path, kind in modules:
        here = hits(patterns, kind, path)
        missing.difference_update(here)
        if here and not any(not above or path.startswith(f"{above}.") for above in paths):
            paths.append(path)
    if missing:
        raise unmatched(where, missing, (kind for _, kind in modules), [path for path, _ in modules if path])
    return paths
