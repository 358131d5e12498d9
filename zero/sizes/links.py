"""The traffic of a step: bytes on each link, and the seconds that each unit takes of device, links, host and drive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero.plan.formats import ITEMSIZE, wire_nbytes
from zero.plan.memory import Scheme, UnitBytes
from zero.plan.placement import is_updated, keeps_copy
from zero.plan.units import UnitPlan
from zero.sizes.rates import Rates
from zero.sizes.step_time import UnitTimes

_FP32 = 4


class Links(NamedTuple):
    """Bytes that one rank sends in a step: to ranks of its own host, of others; between device and host; to the drive
    and from it. As many arrive from other ranks."""

    intra_host: float = 0.0
    inter_host: float = 0.0
    host_link: float = 0.0
    drive: float = 0.0

    @property
    def sent(self) -> float:
        """Bytes that leave the process for other ranks."""
        return self.intra_host + self.inter_host


def sum_of(*links: Links) -> Links:
    """All of them together."""
    return Links(*map(sum, zip(Links(), *links, strict=True)))


class Group(NamedTuple):
    """Ranks that gather and reduce together: how many, how many of them share a host, and whether NCCL sends.

    Gather and reduction of n bytes make each rank send n (size - 1) / size, along a ring or to each rank at once. Of a
    ring only one rank of each host sends to another host, and the rings of a host take turns in that.
    """

    size: int
    here: int
    ring: bool

    def links(self, nbytes: float) -> Links:
        """Of one gather or reduction of a whole of `nbytes`."""
        sent = nbytes * (self.size - 1) / self.size
        if self.size <= self.here:
            return Links(intra_host=sent)
        away = 1 / self.here if self.ring else (self.size - self.here) / (self.size - 1)
        return Links(intra_host=sent * (1 - away), inter_host=sent * away)


def seconds(links: Links, rates: Rates, written: bool = False) -> float:
    """Of one message between ranks, its parts on both links at once; or of copies, one after the other."""
    copies = over(links.host_link, rates.host_link)
    copies += over(links.drive, rates.drive_write if written else rates.drive_read)
    if not links.sent:
        return copies
    return rates.latency + max(over(links.intra_host, rates.intra_host), over(links.inter_host, rates.inter_host))


def over(nbytes: float, rate: float) -> float:
    """Seconds; nothing takes no time at any rate, and a rate that is not known is not waited for."""
    return nbytes / rate if nbytes and rate else 0.0


@dataclass(frozen=True)
class Moves:
    """The moves and updates of a step: units under a scheme, at these rates."""

    units: Sequence[UnitPlan]
    scheme: Scheme
    rates: Rates
    per_host: int

    @cached_property
    def _held(self) -> list[UnitBytes]:
        return self.scheme.held(self.units)

    @cached_property
    def by_unit(self) -> list[tuple[str, UnitTimes]]:
        """What each unit takes, by the path of its module, in the order of the forward; nothing is computed yet."""
        return [(self.units[index].anchor, self._times(index, messages)) for index, messages in self._messages.items()]

    def links(self, accumulation: int) -> Links:
        """Bytes of a step of so many micro-batches."""
        kinds = {"gather", "regather", *(("reduce", "down") if self.scheme.sharding.grads else ())}
        counts = dict.fromkeys(kinds, accumulation) | {"fetch": 2 * accumulation}
        each = (found for messages in self._messages.values() for found in messages.items())
        often = ((counts.get(kind, 1), link) for kind, links in each for link in links)
        return sum_of(*(Links(*(count * nbytes for nbytes in link)) for count, link in often))

    @cached_property
    def _messages(self) -> dict[int, dict[str, list[Links]]]:
        """By unit, in the order of the forward: the messages and copies of each kind, as named in `UnitTimes`."""
        uses, count = self.scheme.uses, len(self.units)
        again = {use.unit: use.gathered for use in uses[count:]}
        return {
            use.unit: self._between_ranks(self.units[use.unit], use.gathered, again[use.unit])
            | self._off_device(use.unit)
            for use in uses[:count]
        }

    def _group(self, size: int, stride: int = 1) -> Group:
        """So many ranks, this far apart; those of a shard, or of a second copy, are consecutive."""
        return Group(size, max(1, min(size, self.per_host // stride)), self.scheme.mirrored)

    def _between_ranks(self, unit: UnitPlan, gathered: bool, again: bool) -> dict[str, list[Links]]:
        scheme, updated = self.scheme, is_updated(unit)
        whole = ITEMSIZE[unit.dtype] * unit.layout.numel
        if scheme.coded[0] and updated and gathered:
            whole = wire_nbytes(unit.layout.numel)
        second = scheme.secondary
        inside = self._group(second if second > 1 else scheme.parts)
        publish = []
        if updated and scheme.resharded and second > 1:
            publish = [self._group(scheme.parts // second, second).links(whole / second)]
        elif updated and not gathered:
            publish = [self._group(scheme.parts).links(whole)]
        return {
            "gather": [inside.links(whole)] if gathered else [],
            "regather": [inside.links(whole)] if again else [],
            "reduce": self._reduction(unit) if updated else [],
            "publish": publish,
        }

    def _reduction(self, unit: UnitPlan) -> list[Links]:
        """The messages of zero/core/reduction.py: along shard, along replica, or the first and then the second."""
        scheme = self.scheme
        dtype = scheme.travel or (scheme.accumulate if scheme.collected else unit.dtype)
        first = wire_nbytes(unit.layout.numel) if scheme.coded[1] else ITEMSIZE[dtype] * unit.layout.numel
        replica = self._group(scheme.replicas, scheme.parts)
        group = self._group(scheme.parts) if scheme.parts > 1 else replica
        sent = group._replace(ring=scheme.native).links(first)  # else to each rank, which adds up
        if scheme.parts > 1 and scheme.replicas == 1:
            return [sent]
        sums = replica.links(_FP32 * unit.layout.numel // scheme.parts)
        return [sent, sums] if scheme.parts == 1 else [sent, sums, sums]

    def _off_device(self, index: int) -> dict[str, list[Links]]:
        """Copies between device, host and drive. Where the host is the device there is nothing to copy."""
        scheme, unit, held = self.scheme, self.units[index], self._held[index]
        copied, moved = scheme.mirrored, held.away
        updated, away = is_updated(unit), not scheme.placements[index].used_on_device
        through = moved.record if scheme.placements[index].streamed else 0
        coded = scheme.coded[0] and updated  # then 8 bits rest on the device
        up = held.device.parameters * (updated and away)
        up += wire_nbytes(unit.layout.numel) // scheme.parts * (coded and away)
        return {
            "fetch": [Links(host_link=copied * moved.parameters, drive=held.file.parameters)] if not coded else [],
            "down": [Links(host_link=copied * (moved.gradients if away else moved.parameters) * updated)],
            "up": [Links(host_link=copied * up)],
            "bring": [Links(host_link=through)],
            "back": [Links(host_link=through)],
            "read": [Links(drive=held.file.record)],
            "write": [Links(drive=held.file.record + held.file.parameters * updated)],
        }

    def _times(self, index: int, messages: Mapping[str, Sequence[Links]]) -> UnitTimes:
        """Also of copying each gradient into its unit's, or adding it to that of earlier micro-batches; and of the
        optimizer's step, which reads the gradient, and reads and writes parameter, master and moments."""
        scheme, rates, unit, held = self.scheme, self.rates, self.units[index], self._held[index].all
        placement, updated = scheme.placements[index], is_updated(unit)
        away = not placement.used_on_device
        record = held.record + (0 if keeps_copy(placement, scheme.mirrored) else held.parameters)
        bandwidth = rates.host_bandwidth if away else rates.device_bandwidth
        update = over((held.gradients + 2 * record) * updated, bandwidth)
        taken = ITEMSIZE[unit.dtype] + ITEMSIZE[scheme.accumulate if scheme.collected else unit.dtype]
        found = {kind: sum(seconds(link, rates, kind == "write") for link in each) for kind, each in messages.items()}
        found["bring"] += update if placement.streamed else 0.0
        return UnitTimes(
            **found,
            backward=over(taken * unit.layout.numel * updated, rates.device_bandwidth),
            stay=0.0 if away or placement.streamed else update,
            update=update if away else 0.0,
        )
