"""Which units to gather ahead and which to keep: the order of uses, learnt in one step, followed in later ones."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Limits:
    """How far ahead parameters are gathered and how long they stay, in elements. They change lifetimes, never numbers.

    ahead:        so many may be gathered before their use, and at least one unit; 0: none;
    live:         nothing more is gathered ahead once so many are whole or being gathered;
    reuse:        a unit that is used again within so many elements of the order is kept until then;
    whole:        units of at most so many stay whole between uses, 0: none ...
    whole_in_all: ... as long as they have at most so many together, in order of registration;
    read:         so many shards, in units, may be read ahead from files to host memory. They take none of the
                  device's, so this reaches further than `ahead`; with `ahead` 0 none are.
    """

    ahead: int = 50_000_000
    live: int = 1_000_000_000
    reuse: int = 0
    whole: int = 0
    whole_in_all: int = sys.maxsize
    read: int = 5

    @classmethod
    def of_section(cls, section: Any) -> Limits:
        """The limits of a configuration's section `zero_optimization`."""
        return cls(
            section.stage3_prefetch_bucket_size,
            section.stage3_max_live_parameters,
            section.stage3_max_reuse_distance,
            section.stage3_param_persistence_threshold,
            section.stage3_model_persistence_threshold,
            section.offload_param.buffer_count,
        )


class Position(NamedTuple):
    """A place in a learnt order: the index just after the last use, and whether that use was foreseen."""

    index: int
    known: bool


START = Position(0, True)


def advance(order: Sequence[int], position: Position, unit: int) -> Position:
    """The position after `unit` was used: its next occurrence at or after `position`, else from the start.

    A unit that is not in the order leaves the index unchanged and reports `known=False`: the model took another path,
    and nothing is predicted until it is back on a known one.
    """
    for start, stop in ((position.index, len(order)), (0, position.index)):
        for index in range(start, stop):
            if order[index] == unit:
                return Position(index + 1, True)
    return Position(position.index, False)


def to_come(order: Sequence[int], position: Position) -> Sequence[int]:
    """The uses expected from `position` on; none if the last one was not foreseen."""
    return order[position.index :] if position.known else ()


def fetched_ahead(
    coming: Sequence[int],
    sizes: Sequence[int],
    limits: Limits,
    *,
    used: Collection[int] = (),
    kept: Collection[int] = (),
    travelling: Collection[int] = (),
) -> list[int]:
    """The units to gather now, in order of the `coming` uses; `sizes[unit]` in elements.

    used: in use now; kept: whole although not in use; travelling: gathered ahead earlier and not used yet.
    It stops at a unit in use: that one is released first, and later units would wait in memory.
    """
    on_their_way = sum(sizes[unit] for unit in travelling)
    live = on_their_way + sum(sizes[unit] for unit in {*used, *kept})
    fetched: list[int] = []
    for unit in coming if limits.ahead else ():
        if unit in used:
            break
        if unit in kept or unit in travelling or unit in fetched:
            continue
        full = on_their_way + sizes[unit] > limits.ahead and (fetched or travelling)
        if full or live + sizes[unit] > limits.live:
            break
        fetched.append(unit)
        on_their_way += sizes[unit]
        live += sizes[unit]
    return fetched


def read_ahead(coming: Sequence[int], limits: Limits, files: Collection[int], there: Collection[int]) -> list[int]:
    """The units whose shards to read from files now, in order of the `coming` uses.

    files: units whose shards rest in files; there: units that are whole or being gathered, and need no read.
    """
    read: list[int] = []
    for unit in coming if limits.ahead else ():
        if len(read) == limits.read:
            break
        if unit in files and unit not in there and unit not in read:
            read.append(unit)
    return read


def used_again(coming: Sequence[int], sizes: Sequence[int], limits: Limits, unit: int) -> bool:
    """Whether `unit` is used again within `limits.reuse` elements of others."""
    between = 0
    for other in coming:
        if other == unit:
            return True
        between += sizes[other]
        if between > limits.reuse:
            return False
    return False


def stay_whole(sizes: Sequence[int], limits: Limits) -> list[int]:
    """The units that stay whole between uses; `sizes` in order of registration; one that does not fit is skipped."""
    chosen, total = [], 0
    for unit, numel in enumerate(sizes):
        if 0 < numel <= limits.whole and total + numel <= limits.whole_in_all:
            chosen.append(unit)
            total += numel
    return chosen


class ForeseenUse(NamedTuple):
    """One use in a step: the unit, whether it was gathered for it, and the bytes of all whole units then."""

    unit: int
    gathered: bool
    whole: int


def uses(anchors: Sequence[str], sizes: Sequence[int], nbytes: Sequence[int], limits: Limits) -> list[ForeseenUse]:
    """The uses of one micro-batch whose order is known: each unit in the forward, then each in the backward.

    anchors: the path of each unit's module; modules run in this order, then back, and a module's units are whole
    while modules inside it run. sizes: in elements, as elsewhere; nbytes: of whole units. Units that `stay_whole`
    are not counted, and not gathered.
    """
    persistent = set(stay_whole(sizes, limits))
    forth = in_use_order(anchors)
    order = [*forth, *in_use_order(anchors, backward=True)]
    used: list[int] = []
    kept, ahead, found = set(persistent), set[int](), []
    for index, unit in enumerate(order):
        turned, coming = index == len(forth), order[index:]
        for left in [other for other in used if turned or not inside(anchors[unit], anchors[other])]:
            used.remove(left)
            if index <= len(forth) and used_again(coming, sizes, limits, left):
                kept.add(left)
        gathered = unit not in kept and unit not in persistent
        kept.discard(unit)
        ahead.discard(unit)
        used.append(unit)
        ahead.update(fetched_ahead(coming[1:], sizes, limits, used=used, kept=kept, travelling=ahead))
        whole = sum(nbytes[other] for other in {*used, *kept, *ahead} - persistent)
        found.append(ForeseenUse(unit, gathered, whole))
    return found


def in_use_order(anchors: Sequence[str], backward: bool = False) -> list[int]:
    """Units in the order in which modules run, forward or backward, each after those of the modules around its own."""
    units = range(len(anchors))[:: -1 if backward else 1]
    at: dict[str, list[int]] = {}
    for unit in units:
        at.setdefault(anchors[unit], []).append(unit)
    order: dict[int, None] = {}
    for unit in units:
        for path in around(anchors[unit]):
            order.update(dict.fromkeys(at.get(path, ())))
    return list(order)


def around(path: str) -> list[str]:
    """The modules around the one at `path`, and itself, from the root on."""
    parts = path.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) + bool(path))]


def inside(path: str, anchor: str) -> bool:
    """Whether the module at `path` is the one at `anchor`, or in it."""
    return not anchor or path == anchor or path.startswith(f"{anchor}.")
