"""The cost of updating state that rests off the device: streamed to the device, or on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zero.memory.host_bytes import SLOTS, record_nbytes, shard_nbytes
from zero.plan.formats import Formats
from zero.plan.placement import Placement, Where, is_updated, keeps_copy
from zero.plan.units import Parts, UnitPlan, of_each

RESERVE = 0.4  # of the device's memory: for activations, unknown before the first step


class UpdateRates(NamedTuple):
    """Bytes/s while all ranks do the same: over the link, each way; read and written by a step, on either side."""

    link: float
    host: float
    device: float


class UpdateCosts(NamedTuple):
    """Seconds and bytes of one rank and step.

    through: bytes that cross the link both ways at once, if the device updates;
    nbytes:  bytes on the device, for gradients and all state there at once, if it updates.
    """

    on_device: float
    on_host: float
    through: int
    nbytes: int

    def streams(self, room: float) -> bool:
        """Whether the device should update: it is faster, and has `room` bytes for it."""
        return self.on_device < self.on_host and self.nbytes <= room


def update_costs(
    units: Sequence[UnitPlan],
    placements: Sequence[Placement],
    parts: Parts,
    formats: Formats,
    gradients: tuple[str, str],
    rates: UpdateRates,
) -> UpdateCosts:
    """The costs on a device with separate memory. `gradients`: their dtypes on the device, and on the host.

    A record is copied to the device, updated and copied back while the next one comes. The host reads gradient
    and record and writes the record, while gradients and parameters cross the link. A drive is equally busy either way.
    """
    through = kept = largest = there = here = stays = 0
    for unit, at, cut in zip(units, placements, of_each(parts, units), strict=True):
        with_copies = (keeps_copy(at._replace(streamed=streamed), True) for streamed in (True, False))
        record, on_host = (sum(record_nbytes(unit, 0, cut, formats, copied)) for copied in with_copies)
        sums = [shard_nbytes(unit, cut, dtype) for dtype in gradients]
        if not is_updated(unit):
            continue
        if at.optimizer is Where.DEVICE:
            stays += record + sums[0]
            continue
        through, kept, largest = through + record, kept + on_host, max(largest, record)
        there, here = there + sums[0], here + sums[1]
    on_device = through / rates.link + (there + 2 * through) / rates.device
    on_host = max((here + 2 * kept) / rates.host, here / rates.link)
    return UpdateCosts(on_device, on_host, through, stays + there + SLOTS * largest)
