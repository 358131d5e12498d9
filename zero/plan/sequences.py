"""How a sequence is cut over ranks, and which keys and values attention over the pieces needs of other ranks.

Positions are those of the whole sequence. A piece has no gaps, so two different pieces share at most one document: what
queries of one see of the other is a single rectangle, or under a sliding window a band of it. Of a document that lies
inside of a piece nothing travels.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

ALL, CAUSAL = 0, -1
Documents = tuple[int, ...]  # where they begin, ascending from 0, ~ there of padding; and the length behind them


def begins(mark: int) -> int:
    """The position that an entry of documents tells."""
    return max(mark, ~mark)


class Block(NamedTuple):
    """Queries x keys. visible: ALL; CAUSAL, where both are equal; or so many keys up to each query, itself included."""

    queries: range
    keys: range
    visible: int


class Step(NamedTuple):
    """One of as many steps as there are ranks, the first of which is with itself.

    to, source: the ranks that keys go to and come from; sends, receives: which, as (index of the documents, positions);
    blocks: what is computed of those that have come, as (index among `receives`, block).
    """

    to: int
    source: int
    sends: tuple[tuple[int, range], ...]
    receives: tuple[tuple[int, range], ...]
    blocks: tuple[tuple[int, Block], ...]


@functools.lru_cache(64)
def pieces(length: int, ranks: int, halves: bool) -> tuple[tuple[range, ...], ...]:
    """The positions of each rank: one run or, of equal causal work, two `halves`, number r from either end."""
    size = length // (2 * ranks if halves else ranks)
    runs = [range(at, at + size) for at in range(0, size * ranks * (1 + halves), size or 1)]
    return tuple((runs[rank], runs[-1 - rank]) if halves else (runs[rank],) for rank in range(ranks))


def blocks(queries: range, keys: range, documents: Documents, causal: bool, window: int) -> Iterator[Block]:
    """The keys of one piece that the queries of one piece see, in blocks that hold all of them.

    window: keys that a query sees, itself and those before it; 0 for all. Only where it is causal. Padding neither sees
    nor is seen.
    """
    if queries == keys:
        for start, stop in pairwise(documents[max(0, bisect_right(documents, keys.start, key=begins) - 1) :]):
            own = range(max(begins(start), keys.start), min(begins(stop), keys.stop))
            if not own:
                return
            if start < 0:
                continue
            if not window or len(own) <= window:
                yield Block(own, own, CAUSAL if causal else ALL)
                continue
            for at in range(own.start, own.stop, window):
                strip = range(at, min(at + window, own.stop))
                yield Block(strip, range(max(own.start, at - window + 1), strip.stop), window)
        return
    if causal and keys.start > queries.start:
        return
    border = max(queries.start, keys.start)  # the only document of both is the one that holds it
    at = bisect_right(documents, border, key=begins)
    start, stop = documents[at - 1], begins(documents[at])
    if start < 0:
        return
    seeing = range(max(queries.start, start), min(queries.stop, stop))
    seen = range(max(keys.start, start), min(keys.stop, stop))
    if window:
        seen = range(max(seen.start, seeing.start - window + 1), seen.stop)
        seeing = range(seeing.start, min(seeing.stop, seen.stop + window - 1))
    if seeing and seen:
        whole = not window or seeing.stop - seen.start <= window
        yield Block(seeing, seen, ALL if whole else window)


@functools.lru_cache(256)
def ring(
    cut: tuple[tuple[range, ...], ...], rank: int, documents: tuple[Documents, ...], causal: bool, window: int
) -> tuple[Step, ...]:
    """The steps of one rank; `cut`: the pieces of each, `documents`: of each group of rows that have the same."""
    steps = []
    for turn in range(len(cut)):
        to, source = (rank + turn) % len(cut), (rank - turn) % len(cut)
        work, receives = _of_pair(cut[rank], cut[source], documents, causal, window)
        sends = _of_pair(cut[to], cut[rank], documents, causal, window)[1]
        steps.append(Step(to, source, sends, receives, work))
    return tuple(steps)


def _of_pair(
    queries: Sequence[range], keys: Sequence[range], documents: tuple[Documents, ...], causal: bool, window: int
) -> tuple[tuple[tuple[int, Block], ...], tuple[tuple[int, range], ...]]:
    """The blocks of one rank's queries and another's keys, and the keys that these need."""
    work, needed = [], []
    for group, borders in enumerate(documents):
        for piece in keys:
            found = [block for own in queries for block in blocks(own, piece, borders, causal, window)]
            if found:
                work += [(len(needed), block) for block in found]
                span = range(min(each.keys.start for each in found), max(each.keys.stop for each in found))
                needed.append((group, span))
    return tuple(work), tuple(needed)
