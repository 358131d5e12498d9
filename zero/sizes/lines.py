"""Lines that a terminal holds: tables that go on below where they are too wide, and sentences in several lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

WIDTH = 100


def of_each(ranks: int) -> str:
    """Whom figures of one rank are of."""
    return "the one rank" if ranks == 1 else f"each of {ranks:,} ranks"


def table_lines(
    head: str, labels: Sequence[str], columns: Mapping[str, Sequence[str]], whole: bool = True
) -> Iterator[str]:
    """A line of texts for each label, with as many columns as fit; those left follow in tables below if it is `whole`.

    head: above the labels; columns: by the name above them.
    """
    width, names = max(map(len, (head, *labels))), list(columns)
    last = len(names)
    while names:
        if len(names) < last:
            yield ""
        sizes = [2 + max(map(len, (name, *columns[name]))) for name in names]
        count = max(1, sum(width + sum(sizes[: index + 1]) <= WIDTH for index in range(len(names))))
        some, names = names[:count], names[count:] if whole else []
        for label, *cells in ((head, *some), *zip(labels, *(columns[name] for name in some), strict=True)):
            texts = (f"{cell:>{size}}" for cell, size in zip(cells, sizes, strict=False))
            yield f"{label:<{width}}{''.join(texts)}".rstrip()


def wrapped(text: str) -> str:
    """A text whose longer lines are cut between words."""
    lines = (
        textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
    return "\n".join("\n".join(line) for line in lines)


def gigabytes(nbytes: float) -> str:
    """GB of 1e9 bytes, with decimals where they say something."""
    value = nbytes / 1e9
    return f"{value:,.{2 if value < 1000 else 0}f}"
