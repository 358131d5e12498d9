"""Bytes of model state per rank: of one unit by kind and place, and of an engine on the device and off it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from zero.plan.formats import ITEMSIZE, Formats, runs, wire_nbytes
from zero.plan.layout import round_up
from zero.plan.order import ForeseenUse, Limits, around, stay_whole
from zero.plan.placement import Placement, Where, is_updated, keeps_copy
from zero.plan.sharding import Sharding
from zero.plan.units import Parts, UnitPlan, of_each

LINE = 64  # bytes: arrays start on cache lines, so that vector loads are aligned and threads share none
PAGE = 4096  # bytes: reads and writes past the page cache start and end on a page
SLOTS = 2  # on the device, each for the largest record: streamed state of at most two units is there at once
MIB = 2**20
# Bytes of a unit's gradients that may wait to be moved to its flat buffer by one launch. A larger gradient is moved at
# once: that takes as long as a launch, and waiting gradients take memory beside the buffer.
TOGETHER = 1 << 20
COMMUNICATOR = 100_000_000  # bytes that NCCL takes on the device for one, beside torch's memory
_ADAM = Formats()  # of the ZeRO paper: fp32 masters and two fp32 moments
_LIMITS = Limits()


class StateBytes(NamedTuple):
    """Bytes of the three kinds of model state. Masters count as optimizer state, as in the ZeRO paper."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three together."""
        return sum(self)


class KindBytes(NamedTuple):
    """Bytes of model state by kind. The copy of a shard beside its master counts as a master."""

    parameters: int = 0
    gradients: int = 0
    masters: int = 0
    moments: int = 0

    @property
    def record(self) -> int:
        """The bytes that the optimizer updates together; off the device one request moves all of them."""
        return self.masters + self.moments


class UnitBytes(NamedTuple):
    """Bytes of one rank's part of one unit by place, between the uses of the unit; each kind is in one place only."""

    device: KindBytes
    host: KindBytes
    file: KindBytes

    @property
    def away(self) -> KindBytes:
        """Off the device."""
        return KindBytes(*map(add, self.host, self.file))

    @property
    def all(self) -> KindBytes:
        """Wherever they are."""
        return KindBytes(*map(add, self.device, self.away))


def unit_bytes(
    unit: UnitPlan,
    at: Placement,
    rank: int,
    parts: int,
    formats: Formats,
    gradients: tuple[str, str] = ("fp32", "fp32"),
    mirrored: bool = True,
) -> UnitBytes:
    """Bytes of shard `rank` of `parts`: of the parameters, the reduced gradient, masters and moments.

    gradients: the dtypes of the reduced gradient on the device, and off it; mirrored: the device is not the host, so
    that what both use is there twice. A unit that no optimizer updates has parameters only.

    Off the device the parameters, the gradient and the record take whole pages each. The arrays of a record, masters
    before moments, begin on cache lines, and its padding counts with the last of the two.
    """
    window = unit.layout.shard(rank, parts)
    held = {where: KindBytes() for where in Where}
    held[at.params] = KindBytes(*_piece_nbytes(at.params, [(unit.dtype, window.numel)]))
    if is_updated(unit):
        where, dtype = (Where.DEVICE, gradients[0]) if at.used_on_device else (Where.HOST, gradients[1])
        (gradient,) = _piece_nbytes(where, [(dtype, window.numel)])
        held[where] = held[where]._replace(gradients=gradient)
        # In fp32 a copy is the master itself. Without one, fp32 parameters are masters where they are.
        dtypes = unit.dtype if keeps_copy(at, mirrored) else None, formats.master_dtype(unit.dtype)
        first = [(each, window.numel) for each in dtypes if each is not None]
        stretches = runs(unit, window, formats.moments)
        moment = [array for run in stretches for array in formats.moment_arrays(run.numel, run.format)]
        masters, moments = _piece_nbytes(at.optimizer, first, formats.of_unit(unit).states * moment)
        held[at.optimizer] = held[at.optimizer]._replace(masters=masters, moments=moments)
    return UnitBytes(*held.values())


def _piece_nbytes(where: Where, *kinds: Sequence[tuple[str, int]]) -> list[int]:
    """Bytes of arrays that lie in one piece, given for each kind as dtype and elements."""
    line, page = (1, 1) if where is Where.DEVICE else (LINE, PAGE)
    sizes = [sum(round_up(ITEMSIZE[dtype] * numel, line) for dtype, numel in arrays) for arrays in kinds]
    sizes[-1 if sizes[-1] else 0] += -sum(sizes) % page
    return sizes


@dataclass(frozen=True)
class Scheme:
    """How an engine cuts, sends and keeps its state.

    parts, replicas: sizes of the shard axis and of the replica axis, of all units or of each;
    secondary:       with hpZ, ranks that hold a second copy of the parameters, 1 for none;
    accumulation:    micro-batches of a step;
    accumulate, resting: the dtypes of sums of gradients, on the device and off it;
    travel:          the dtype to which gradients are rounded to be sent, None for their own;
    limits:          say which units always stay whole;
    placements:      where the state of each unit rests; None: all on the device;
    mirrored:        whether the device has memory of its own, and NCCL: it is not the host;
    native:          whether NCCL adds up gradients, too; else the slices of all ranks arrive;
    coded:           whether parameters, and whether gradients, are sent in 8 bits;
    uses:            of one micro-batch; where parameters are not resharded nothing is gathered for them.
    """

    sharding: Sharding
    parts: Parts = 1
    replicas: Parts = 1
    secondary: int = 1
    formats: Formats = _ADAM
    accumulation: int = 1
    accumulate: str = "fp32"
    resting: str = "fp32"
    travel: str | None = None
    limits: Limits = _LIMITS
    placements: Sequence[Placement] | None = None
    mirrored: bool = True
    native: bool = False
    coded: tuple[bool, bool] = (False, False)
    uses: Sequence[ForeseenUse] = ()

    @property
    def collected(self) -> bool:
        """Whether micro-batches add up in whole buffers first."""
        return self.accumulation > 1 and not self.sharding.grads

    @property
    def resharded(self) -> bool:
        """Whether parameters are whole only while they are used; of one number of parts for all units."""
        return self.sharding.params and (self.parts > 1 or self._places(1)[0].params is not Where.DEVICE)

    def _places(self, count: int) -> Sequence[Placement]:
        return self.placements or [Placement(Where.DEVICE, Where.DEVICE)] * count

    def held(self, units: Sequence[UnitPlan], rank: Parts = 0) -> list[UnitBytes]:
        """The bytes of each unit on this rank of the shard axis, or on this one of each; see `unit_bytes`.

        Ranks differ only where the moments of large parameters alone are in fewer bits.
        """
        each = zip(units, self._places(len(units)), of_each(rank, units), of_each(self.parts, units), strict=True)
        dtypes = self.accumulate, self.resting
        return [unit_bytes(unit, at, own, parts, self.formats, dtypes, self.mirrored) for unit, at, own, parts in each]


def communicators(world: int, shards: int, replicas: int, secondary: int = 1, others: Sequence[int] = ()) -> int:
    """How many NCCL communicators an engine of `world` ranks makes on each, as `Meshes` does for its dense units.

    There is one of all ranks, and one along each other axis; reductions have another one. others: sizes of axes along
    which nothing is reduced.
    """
    sums = [size for size in (shards, replicas) if size > 1]
    plain = [secondary, world // secondary] if secondary > 1 else []
    plain += [shards * replicas] if len(sums) > 1 else []
    return (world > 1) + len(sums) + sum(1 < size < world for size in (*sums, *plain, *others))


def alive_nbytes(
    units: Sequence[UnitPlan],
    scheme: Scheme,
    rank: Parts = 0,
    gathered: Collection[str] = (),
    local_gradients: Collection[str] = (),
    reduced_gradients: Collection[str] = (),
) -> KindBytes:
    """Bytes that an engine keeps on one rank's device at a moment described by names of units.

    `gathered`: units whose parameters are full although they are resharded; `local_gradients`: units with a full
    gradient buffer of this rank; `reduced_gradients`: units whose reduced shard exists. State off the device is not
    counted, `host_bytes` does that. Of messages in 8 bits the owner keeps its part, and each rank its error.
    """
    sharding, secondary = scheme.sharding, scheme.secondary
    numels = [sum(spec.numel for spec in unit.params) for unit in units]
    kept = {units[index].name for index in stay_whole(numels, scheme.limits)}
    found = []
    for unit, held, parts in zip(units, scheme.held(units, rank), of_each(scheme.parts, units), strict=True):
        full = unit.layout.numel
        nbytes = ITEMSIZE[unit.dtype] * full
        resharded = sharding.params and (parts > 1 or held.away.parameters > 0)
        travels = resharded and parts > 1 and scheme.coded[0] and is_updated(unit) and unit.name not in kept
        parameters = held.device.parameters if resharded else nbytes
        parameters += sum(spec.extra_nbytes for spec in unit.params)
        parameters += nbytes if resharded and (unit.name in gathered or unit.name in kept) else 0
        parameters += wire_nbytes(full) // parts if travels else 0
        parameters += (wire_nbytes(full) if travels else nbytes) // secondary if resharded and secondary > 1 else 0
        gradients = wire_nbytes(full) if scheme.coded[1] and parts > 1 and is_updated(unit) else 0
        if unit.name in local_gradients:
            local = unit.dtype if sharding.grads or scheme.accumulation == 1 else scheme.accumulate
            gradients += ITEMSIZE[local] * full
        if unit.name in reduced_gradients:
            gradients += held.device.gradients
        found.append(KindBytes(parameters, gradients, held.device.masters, held.device.moments))
    return total_of(found)


def total_of(kinds: Iterable[KindBytes]) -> KindBytes:
    """All of them together, by kind."""
    return KindBytes(*map(sum, zip(KindBytes(), *kinds, strict=True)))


class HostBytes(NamedTuple):
    """Bytes of one rank off the device, by purpose.

    masters, moments: records that stay in memory, padding included; copies of shards are among the masters;
    parameters:       shards of parameters that stay in memory;
    gradients:        shards of gradients of all units that the host updates;
    buffers:          buffers for records and shards between drive and memory;
    files:            on drives, not in memory.
    """

    masters: int
    moments: int
    parameters: int
    gradients: int
    buffers: int
    files: int

    @property
    def memory(self) -> int:
        """All host memory: everything but the files."""
        return sum(self) - self.files


def host_bytes(held: Sequence[UnitBytes], buffer_count: int, param_buffer_count: int) -> HostBytes:
    """The bytes of these units off the device.

    `buffer_count`: buffers, each as large as the largest record in a file; `param_buffer_count`: the same for shards of
    parameters.
    """
    host = total_of(each.host for each in held)
    slot = max((each.file.record for each in held), default=0)
    param_slot = max((each.file.parameters for each in held), default=0)
    buffers = buffer_count * slot + param_buffer_count * param_slot
    files = sum(sum(each.file) for each in held)
    return HostBytes(host.masters, host.moments, host.parameters, host.gradients, buffers, files)


def host_table(held: HostBytes) -> str:
    """The bytes as a table in MiB: one line for each kind above 0, and the total memory."""
    rows = [(name, nbytes) for name, nbytes in held._asdict().items() if nbytes and name != "files"]
    rows.append(("host memory in all", held.memory))
    if held.files:
        rows.append(("files", held.files))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}} {nbytes / MIB:12,.1f} MiB" for name, nbytes in rows)


class InFlight(NamedTuple):
    """Gradient bytes in flight while a unit's backward computes, with its flat buffer, and the peak until its end.

    The peak includes the gradient that autograd delivers, and the unit's messages.
    """

    during: int
    most: int


def in_flight_nbytes(units: Sequence[UnitPlan], scheme: Scheme) -> list[InFlight]:
    """Bytes of gradients in flight in the backward of each unit: from autograd, and between ranks.

    Frozen units have none. Kept sums and buffers are not counted.
    """
    each = [*zip(of_each(scheme.parts, units), of_each(scheme.replicas, units), strict=True)]
    collected, sent = scheme.collected, []
    trained = [index for index, unit in enumerate(units) if is_updated(unit)][::-1]
    for unit, (parts, replicas) in ((units[index], each[index]) for index in trained):
        size = parts if parts > 1 else replicas
        dtype = scheme.travel or (scheme.accumulate if collected else unit.dtype)
        # A buffer that is whole on every rank and in fp32 receives the sum, and is counted as the sum.
        stays = collected or (parts == 1 and dtype == scheme.accumulate == "fp32")
        nbytes = ITEMSIZE[dtype] * unit.layout.numel
        # With NCCL that only moves them, the own slice arrives, too.
        arriving = nbytes // size if scheme.native else nbytes - (0 if scheme.mirrored else nbytes // size)
        own = 0 if stays else nbytes
        sizes = [ITEMSIZE[unit.dtype] * spec.numel for spec in unit.params]
        # With small gradients the buffer is allocated when most have come, and the unit's activations are being freed.
        early = own if max(sizes) > TOGETHER or sum(sizes) > 2 * TOGETHER else 0
        sent.append((own + (arriving if size > 1 else 0), own, early, max(sizes), sizes[0]))
    # A unit's messages may take as long as the next unit computes, or the next two if gradients stay anyway.
    width = 3 if any(replicas > 1 and parts == 1 for parts, replicas in each) else 2
    found = [InFlight(0, 0)] * len(units)
    wide: dict[str, list[int]] = {}  # by anchor, units of several modules, by index in `trained`
    for place, index in enumerate(trained):
        if len({spec.name.rpartition(".")[0] for spec in units[index].params}) > 1:
            wide.setdefault(units[index].anchor, []).append(place)
    for end, index in enumerate(trained, 1):
        travels, own, early, largest, last = sent[end - 1]
        before = sum(each[0] for each in sent[max(0, end - width) : end - 1])
        # A unit of several modules around or beside this one has some gradients already.
        outer = (place for path in around(units[index].anchor) for place in wide.get(path, ()))
        before += sum(sent[place][1] for place in outer if place >= end)
        # The largest comes before the unit's messages begin; that of the module that runs first comes last, with them.
        found[index] = InFlight(before + early, before + max(own + largest, travels + last))
    return found
