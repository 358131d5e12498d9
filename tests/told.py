"""Pages of mistakes: a line at the margin is what is given, the indented lines below it are what is said of it.

{"fp16": {"enabled": "yes"}}
    fp16.enabled: got 'yes', wanted true or false
"""

from __future__ import annotations

import textwrap


def cases(page: str) -> list[tuple[str, str]]:
    """What is given, and what is said of it, of each mistake of a page."""
    found: list[tuple[str, list[str]]] = []
    for line in textwrap.dedent(page).strip().splitlines():
        if line.startswith("    "):
            found[-1][1].append(line[4:])
        elif line:
            found.append((line, []))
    return [(given, "\n".join(said)) for given, said in found]


def as_told(found: str, told: str) -> bool:
    """Whether this was said; where a page ends with "...", what follows may be anything."""
    return found.startswith(told[:-3]) if told.endswith("...") else found == told
