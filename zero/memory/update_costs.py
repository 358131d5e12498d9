"""The cost of updating state that rests off the device: streamed to the device, or on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zero.plan.formats import Formats
from zero.plan.memory import SLOTS, unit_bytes
from zero.plan.placement import Placement, Where
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
        streamed, on_host = (
            unit_bytes(unit, at._replace(streamed=streams), 0, cut, formats, gradients) for streams in (True, False)
        )
        if at.optimizer is Where.DEVICE:
            stays += on_host.device.record + on_host.device.gradients
            continue
        record = streamed.away.record
        through, kept, largest = through + record, kept + on_host.away.record, max(largest, record)
        there, here = there + streamed.device.gradients, here + on_host.host.gradients
    on_device = through / rates.link + (there + 2 * through) / rates.device
    on_host = max((here + 2 * kept) / rates.host, here / rates.link)
    return UpdateCosts(on_device, on_host, through, stays + there + SLOTS * largest)
