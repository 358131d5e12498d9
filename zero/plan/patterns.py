"""How the configuration names modules: by class or by a pattern on their path."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Sequence


def hits(patterns: Iterable[str], kind: str, path: str) -> list[str]:
    """The patterns that name a module of class `kind` at `path`; fnmatch on the path, which the root has none of."""
    return [pattern for pattern in patterns if pattern == kind or (path and fnmatch.fnmatchcase(path, pattern))]


def is_inside(name: str, scope: str) -> bool:
    """Whether a module of this name is that of the name `scope`, or in it."""
    return not scope or f"{name}.".startswith(f"{scope}.")


def outermost(
    where: str, modules: Sequence[tuple[str, str]], patterns: Sequence[str], also: Collection[str] = ()
) -> list[str]:
    """The outermost paths of the modules that `patterns` or `also` name, in order.

    `modules` are (path, class), parents before children. Raises ValueError for a pattern that names none.
    """
    missing, paths = set(patterns), []
    for path, kind in modules:
        here = hits(patterns, kind, path)
        missing.difference_update(here)
        if (here or path in also) and not any(not above or path.startswith(f"{above}.") for above in paths):
            paths.append(path)
    if missing:
        classes = sorted({kind for _, kind in modules})
        known = [*classes, *(path for path, kind in modules if path and kind != "ModuleList")]  # a list is never called
        hints = [difflib.get_close_matches(pattern, known, 1) for pattern in sorted(missing)]
        near = "".join(f"; did you mean '{hint[0]}'?" for hint in hints if hint) or "."
        text = f"{where}: {sorted(missing)} match no module of the model{near} Its classes are {classes}."
        raise ValueError(text)
    return paths
