"""Where the state of each unit rests between its uses: on the device, in host memory, or in files on a drive."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from zero.plan.units import Parts, UnitPlan, of_each


class Where(enum.Enum):
    """A place of rest; the values are those of `device` in the JSON.

    DEVICE: the memory of the device that computes;
    HOST:   memory of the host, pinned where the device is a GPU;
    FILE:   a file; in memory only while it is used.
    """

    DEVICE = "none"
    HOST = "cpu"
    FILE = "nvme"


class Placement(NamedTuple):
    """Where one unit's optimizer state (masters and moments) and its shard of the parameters rest.

    streamed: state that rests off the device is copied there for each update.
    """

    optimizer: Where
    params: Where
    streamed: bool = False

    @property
    def used_on_device(self) -> bool:
        """Whether the device computes the update; gradients then stay there."""
        return self.streamed or self.optimizer is Where.DEVICE


def place(
    units: Sequence[UnitPlan],
    parts: Parts,
    optimizer: Where,
    params: Where,
    ratio: float = 1.0,
    max_in_cpu: int = 0,
    streamed: bool = False,
) -> list[Placement]:
    """Choose for each unit where its state rests; the same on all ranks.

    optimizer: where optimizer state goes; a unit that is not trained has none and stays on the device. `ratio`, in
        [0, 1], is the share of the trained elements for which it goes there: as many whole units as fit in the rest
        keep theirs on the device, the first ones first. The backward reaches those last, so their update has the
        least time for gradients, transfers and host memory, and no other work left to overlap with.
    params: where shards of parameters go. Of those in files, units with at most `max_in_cpu` elements together of one
        rank's shards (1 / `parts` of the unit) rest in host memory instead, the first ones first.
    streamed: state that rests off the device is updated there all the same.

    Padding counts as elements: it takes memory, too. A unit that no longer fits is skipped, and smaller
    ones after it may still fit.
    """
    trained = [unit.layout.numel if is_updated(unit) else 0 for unit in units]
    stay = _fitting(trained, int((1 - ratio) * sum(trained)))
    shards = [unit.layout.numel // cut for unit, cut in zip(units, of_each(parts, units), strict=True)]
    lifted = _fitting(shards, max_in_cpu) if params is Where.FILE else set()
    places = [Where.DEVICE if index in stay or not is_updated(unit) else optimizer for index, unit in enumerate(units)]
    return [
        Placement(at, Where.HOST if index in lifted else params, streamed and at is not Where.DEVICE)
        for index, at in enumerate(places)
    ]


def is_updated(unit: UnitPlan) -> bool:
    """Whether the optimizer updates the unit, and so keeps state for it."""
    return unit.requires_grad and unit.group >= 0


def keeps_copy(placement: Placement, mirrored: bool) -> bool:
    """Whether a unit's shard has a copy beside its master, because the two are used in different memories.

    The copy is part of the record, or on the device with a master there. `mirrored`: the device is not the host.
    """
    apart = placement.used_on_device != (placement.params is Where.DEVICE)
    return placement.params is Where.FILE or (mirrored and apart)


def _fitting(sizes: Sequence[int], room: int) -> set[int]:
    """Indices of the sizes that fit into `room`, taken in order; one that is too large for the rest is skipped."""
    taken = set()
    for index, size in enumerate(sizes):
        if size <= room:
            taken.add(index)
            room -= size
    return taken
