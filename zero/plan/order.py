"""What comes next and what stays: the order in which units are used, learnt in one step, followed in later ones."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Limits:
    """How far ahead parameters come and how long they stay, in elements. They change lifetimes, never numbers.

    ahead:        that many may be on their way before their use, and one unit at least; 0: none;
    live:         nothing more is fetched ahead once so many are whole or on their way;
    reuse:        a unit that is used again within so many elements of the order is kept in between;
    whole:        units of at most so many stay whole between uses, 0: none ...
    whole_in_all: ... as long as they have at most so many together, in order of registration;
    read:         so many shards, in units, may be on their way from files to host memory. They take none of the
                  device's, so this reaches further than `ahead`; with `ahead` 0 none are.
    """

    ahead: int = 50_000_000
    live: int = 1_000_000_000
    reuse: int = 0
    whole: int = 0
    whole_in_all: int = sys.maxsize
    read: int = 5


class Position(NamedTuple):
    """A place in a learnt order: the index just after the last use, and whether that use was foreseen."""

    index: int
    known: bool


START = Position(0, True)


def advance(order: Sequence[int], position: Position, unit: int) -> Position:
    """The position after `unit` was used: its next occurrence at or after `position`, else from the start.

    A unit that the order does not hold leaves the index where it was and reports `known=False`: the model
    took another path, and nothing should be foretold until it is back on a known one.
    """
    for start, stop in ((position.index, len(order)), (0, position.index)):
        for index in range(start, stop):
            if order[index] == unit:
                return Position(index + 1, True)
    return Position(position.index, False)


def fetched_ahead(
    order: Sequence[int],
    position: Position,
    sizes: Sequence[int],
    limits: Limits,
    *,
    used: Collection[int] = (),
    kept: Collection[int] = (),
    travelling: Collection[int] = (),
) -> list[int]:
    """The units to fetch now, in order; `sizes[unit]` in elements. None where the last use was not foreseen.

    used: in use now; kept: whole although not in use; travelling: fetched ahead earlier and not used yet.
    It stops at a unit that is in use: that one is released first, and what comes behind it would wait in memory.
    """
    if not position.known or limits.ahead == 0:
        return []
    on_their_way = sum(sizes[unit] for unit in travelling)
    live = on_their_way + sum(sizes[unit] for unit in {*used, *kept})
    found: list[int] = []
    for unit in order[position.index :]:
        if unit in used:
            break
        if unit in kept or unit in travelling or unit in found:
            continue
        full = on_their_way + sizes[unit] > limits.ahead and (found or travelling)
        if full or live + sizes[unit] > limits.live:
            break
        found.append(unit)
        on_their_way += sizes[unit]
        live += sizes[unit]
    return found


def read_ahead(
    order: Sequence[int], position: Position, limits: Limits, files: Collection[int], there: Collection[int]
) -> list[int]:
    """The units whose shards are to be read from files now, in order. None where the last use was not foreseen.

    files: units whose shards rest in files; there: whole, or on their way to be, so that nothing need be read.
    """
    found: list[int] = []
    for unit in order[position.index :] if position.known and limits.ahead else ():
        if len(found) == limits.read:
            break
        if unit in files and unit not in there and unit not in found:
            found.append(unit)
    return found


def used_again(order: Sequence[int], position: Position, sizes: Sequence[int], limits: Limits, unit: int) -> bool:
    """Whether the order uses `unit` again before more than `limits.reuse` elements of others; False off the order."""
    between = 0
    for other in order[position.index :] if position.known else ():
        if other == unit:
            return True
        between += sizes[other]
        if between > limits.reuse:
            return False
    return False


def stay_whole(sizes: Sequence[int], limits: Limits) -> list[int]:
    """The units that stay whole between uses; `sizes` in order of registration; one that does not fit is left out."""
    chosen, total = [], 0
    for unit, numel in enumerate(sizes):
        if 0 < numel <= limits.whole and total + numel <= limits.whole_in_all:
            chosen.append(unit)
            total += numel
    return chosen
