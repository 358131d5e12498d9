"""The cost of updating state that rests off the device: streamed to the device, or on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from zero.plan.memory import SLOTS, Scheme
from zero.plan.placement import Where
from zero.plan.units import UnitPlan

RESERVE = 0.4  # of the device's memory: for activations, unknown before the first step


class UpdateRates(NamedTuple):
    """Bytes/s while all ranks do the same: over the link, each way; read and written by a step, on either side."""

    link: float
    host: float
    device: float


class UpdateCosts(NamedTuple):
    """Seconds and bytes of one rank and step.

    through: that cross the link both ways at once, if the device updates; nbytes: of gradients and state on it then.
    """

    on_device: float
    on_host: float
    through: int
    nbytes: int

    def streams(self, room: float) -> bool:
        """Whether the device should update: it is faster, and has `room` bytes for it."""
        return self.on_device < self.on_host and self.nbytes <= room


def update_costs(units: Sequence[UnitPlan], scheme: Scheme, rates: UpdateRates) -> UpdateCosts:
    """The costs on a device with separate memory, of either side under an otherwise given scheme.

    A record is copied to the device, updated and copied back while the next one comes. The host reads gradient
    and record and writes the record, while gradients and parameters cross the link. A drive is equally busy either way.
    """
    through = kept = largest = there = here = stays = 0
    streamed, on_host = (
        replace(scheme, placements=[at._replace(streamed=streams) for at in scheme.placements]).held(units)
        for streams in (True, False)
    )
    for at, if_streamed, if_on_host in zip(scheme.placements, streamed, on_host, strict=True):
        if at.optimizer is Where.DEVICE:
            stays += if_on_host.device.record + if_on_host.device.gradients
            continue
        record = if_streamed.away.record
        through, kept, largest = through + record, kept + if_on_host.away.record, max(largest, record)
        there, here = there + if_streamed.device.gradients, here + if_on_host.host.gradients
    on_device = through / rates.link + (there + 2 * through) / rates.device
    on_host = max((here + 2 * kept) / rates.host, here / rates.link)
    return UpdateCosts(on_device, on_host, through, stays + there + SLOTS * largest)
