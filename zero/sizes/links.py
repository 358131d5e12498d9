"""What travels in a step: bytes on each link, and the seconds that each unit takes of device, links, host and drive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero.plan.formats import ITEMSIZE, Formats, wire_nbytes
from zero.plan.memory import unit_bytes
from zero.plan.placement import is_updated, keeps_copy
from zero.plan.units import UnitPlan
from zero.sizes.choice import Scheme
from zero.sizes.rates import Rates
from zero.sizes.timeline import UnitTimes

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

    def times(self, count: int) -> Links:
        """So many times that."""
        return Links(*(count * nbytes for nbytes in self))


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


class Groups(NamedTuple):
    """Along each axis of a scheme: shard, replica; inside and across, of hpZ's second copy."""

    shard: Group
    replica: Group
    inside: Group
    across: Group


def groups_of(scheme: Scheme, per_host: int) -> Groups:
    """With so many ranks on each host; those of a shard, or a second copy, are consecutive."""

    def along(size: int, stride: int) -> Group:
        return Group(size, max(1, min(size, per_host // stride)), scheme.mirrored)

    second = scheme.secondary
    across = along(scheme.parts // second, second)
    return Groups(along(scheme.parts, 1), along(scheme.replicas, scheme.parts), along(second, 1), across)


def seconds(links: Links, rates: Rates) -> float:
    """Of one message between ranks, its parts on both links at once."""
    if not links.sent:
        return 0.0
    return rates.latency + max(over(links.intra_host, rates.intra_host), over(links.inter_host, rates.inter_host))


def over(nbytes: float, rate: float) -> float:
    """Seconds; nothing takes no time at any rate, and a rate that is not known is not waited for."""
    return nbytes / rate if nbytes and rate else 0.0


class UnitTraffic(NamedTuple):
    """Of one unit: bytes by link in each micro-batch, and in addition once in a step; and seconds."""

    each: Links
    once: Links
    times: UnitTimes


@dataclass(frozen=True)
class Moves:
    """What moves and is updated in a step: units under a scheme, with these formats of state, at these rates."""

    units: Sequence[UnitPlan]
    scheme: Scheme
    formats: Formats
    rates: Rates
    per_host: int

    @cached_property
    def by_unit(self) -> list[tuple[str, UnitTraffic]]:
        """Of each unit, by the path of its module, in the order of the forward; nothing is computed yet."""
        groups, uses, count = groups_of(self.scheme, self.per_host), self.scheme.uses, len(self.units)
        again = {use.unit: use.gathered for use in uses[count:]}
        return [
            (self.units[use.unit].anchor, self._unit(use.unit, groups, use.gathered, again[use.unit]))
            for use in uses[:count]
        ]

    def _unit(self, index: int, groups: Groups, gathered: bool, again: bool) -> UnitTraffic:
        unit, scheme, rates = self.units[index], self.scheme, self.rates
        whole, updated = ITEMSIZE[unit.dtype] * unit.layout.numel, is_updated(unit)
        if scheme.coded[0] and updated and gathered:
            whole = wire_nbytes(unit.layout.numel)
        inside = groups.inside if scheme.secondary > 1 else groups.shard
        gather = inside.links(whole) if gathered else Links()
        regather = inside.links(whole) if again else Links()
        reduce = self._reduction(unit, groups) if updated else []
        publish = Links()
        if updated and scheme.cut and scheme.secondary > 1:
            publish = groups.across.links(whole / scheme.secondary)
        elif updated and not gathered:
            publish = groups.shard.links(whole)
        down, each, once, times = self._off_device(unit, index)
        each, once = sum_of(each, gather, regather), sum_of(once, publish)
        reduced = sum_of(Links(host_link=down), *reduce)
        times = times._replace(
            gather=seconds(gather, rates),
            regather=seconds(regather, rates),
            reduce=sum(seconds(part, rates) for part in reduce),
            publish=seconds(publish, rates),
        )
        if scheme.sharding.grads:
            return UnitTraffic(sum_of(each, reduced), once, times)
        return UnitTraffic(each, sum_of(once, reduced), times)

    def _reduction(self, unit: UnitPlan, groups: Groups) -> list[Links]:
        """The messages of zero/core/reduction.py: along shard, along replica, or the first and then the second."""
        scheme = self.scheme
        dtype = scheme.travel or (scheme.accumulate if scheme.collected else unit.dtype)
        first = wire_nbytes(unit.layout.numel) if scheme.coded[1] else ITEMSIZE[dtype] * unit.layout.numel
        group = groups.shard if scheme.parts > 1 else groups.replica
        sent = group._replace(ring=scheme.native).links(first)  # else to each rank, which adds up
        if scheme.parts > 1 and scheme.replicas == 1:
            return [sent]
        sums = groups.replica.links(_FP32 * unit.layout.numel // scheme.parts)
        return [sent, sums] if scheme.parts == 1 else [sent, sums, sums]

    def _off_device(self, unit: UnitPlan, index: int) -> tuple[float, Links, Links, UnitTimes]:
        """Copies between device, host and drive: bytes of the gradient, others in each micro-batch, and once in a step.

        And the seconds of these, of copying each gradient into its unit's, or adding it to that of earlier
        micro-batches, and of the optimizer's step, which reads the gradient, and reads and writes parameter, master
        and moments.
        """
        scheme, rates, placement = self.scheme, self.rates, self.scheme.placements[index]
        dtypes = scheme.accumulate, scheme.resting
        held = unit_bytes(unit, placement, 0, scheme.parts, self.formats, dtypes, scheme.mirrored)
        every, moved = held.all, held.away
        link = rates.host_link if scheme.mirrored else 0.0
        copied = 1 if scheme.mirrored else 0  # where the host is the device there is nothing to copy
        updated, away = is_updated(unit), not placement.used_on_device
        read_and_written = every.record
        if not keeps_copy(placement, scheme.mirrored):  # else the copy is in the record
            read_and_written += every.parameters
        through = moved.record if placement.streamed else 0
        coded = scheme.coded[0] and updated  # then 8 bits rest on the device
        read = 0 if coded else held.file.parameters
        down = copied * (moved.gradients if away else moved.parameters) * updated
        up = copied * held.device.parameters * (updated and away)
        up += copied * wire_nbytes(unit.layout.numel) // scheme.parts * (coded and away)
        fetched = copied * moved.parameters * (not coded)
        update = over(
            (every.gradients + 2 * read_and_written) * updated,
            rates.host_bandwidth if away else rates.device_bandwidth,
        )
        taken = ITEMSIZE[unit.dtype] + ITEMSIZE[scheme.accumulate if scheme.collected else unit.dtype]
        times = UnitTimes(
            backward=over(taken * unit.layout.numel * updated, rates.device_bandwidth),
            fetch=over(fetched, link) + over(read, rates.drive_read),
            down=over(down, link),
            stay=0.0 if away or through else update,
            read=over(held.file.record, rates.drive_read),
            update=update if away else 0.0,
            write=over(held.file.record + held.file.parameters * updated, rates.drive_write),
            up=over(up, link),
            bring=over(through, link) + (update if through else 0.0),
            back=over(through, link),
        )
        each = Links(host_link=2 * fetched, drive=2 * read)
        stored = 2 * held.file.record + held.file.parameters * updated
        return down, each, Links(host_link=up + 2 * through, drive=stored), times
