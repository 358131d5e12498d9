"""Bytes of model state per rank: their kinds, the ZeRO paper's formula, and an engine's actual bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from zero.plan.formats import ITEMSIZE, Formats, runs, wire_nbytes
from zero.plan.order import Limits, around, stay_whole
from zero.plan.placement import Placement, Where, is_updated, keeps_copy
from zero.plan.sharding import Sharding
from zero.plan.units import UnitPlan

ADAM = Formats()  # of the ZeRO paper: fp32 masters and two fp32 moments
_HERE = Placement(Where.DEVICE, Where.DEVICE)
# Bytes of a unit's gradients that may wait to be moved to its flat buffer by one launch. A larger gradient is moved at
# once: that takes as long as a launch, and waiting gradients take memory beside the buffer.
TOGETHER = 1 << 20


class StateBytes(NamedTuple):
    """Bytes of the three kinds of model state. Masters count as optimizer state, as in the ZeRO paper."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three together."""
        return sum(self)


def replica_nbytes(numel: int, dtype: str, formats: Formats = ADAM, compact: int | None = None) -> StateBytes:
    """The bytes of one unsharded replica of `numel` parameters: under Adam 2+2+12 each in 16 bit, 4+4+8 in fp32.

    In fp32 the parameter is its own master; in 16 bit the fp32 master is a third optimizer state (Rajbhandari et al.
    2020, section 3.1: K = 12). `formats` may reduce it: with remainders K = 10, with moments in bf16 as well 6, in 8
    bit 4 + 2/64. `compact`: how many of the parameters are large enough for moments in such a format; default: all.
    """
    size = ITEMSIZE[dtype]
    compact = numel if compact is None else compact
    moments = formats.moments_nbytes(compact) + formats.moments_nbytes(numel - compact, "fp32")
    return StateBytes(size * numel, size * numel, moments + formats.master_nbytes(numel, dtype))


def formula_nbytes(
    numel: int, dtype: str, stage: int, world_size: int, formats: Formats = ADAM, compact: int | None = None
) -> StateBytes:
    """ZeRO's formula 2Psi + 2Psi + K Psi (fp32: 4 + 4 + 8): each term divided by `world_size` if the stage cuts it."""
    whole = replica_nbytes(numel, dtype, formats, compact)
    cut = Sharding.of_stage(stage)
    return StateBytes(
        whole.parameters // world_size if cut.params else whole.parameters,
        whole.gradients // world_size if cut.grads else whole.gradients,
        whole.optimizer // world_size if cut.optim else whole.optimizer,
    )


def alive_nbytes(
    units: Sequence[UnitPlan],
    sharding: Sharding,
    parts: int,
    *,
    rank: int = 0,
    formats: Formats = ADAM,
    gathered: Collection[str] = (),
    local_gradients: Collection[str] = (),
    reduced_gradients: Collection[str] = (),
    accumulation: int = 1,
    accumulate: str = "fp32",
    limits: Limits | None = None,
    placements: Sequence[Placement] | None = None,
    mirrored: bool = True,
    secondary: int = 1,
    coded: tuple[bool, bool] = (False, False),
) -> StateBytes:
    """Bytes that an engine keeps on one rank at a moment described by names of units.

    `parts` is the size of the shard axis, `rank` the place on it; shards differ if only the moments of large
    parameters are in fewer bits. `gathered`: units whose parameters are full although they are cut between uses;
    `local_gradients`: units with a full gradient buffer of this rank; `reduced_gradients`: units whose reduced
    shard exists; `accumulate`: the dtype in which gradients add up; `limits` say which units always stay whole.
    `placements`: where the state of each unit rests; state off the device is not counted (`host_bytes` counts it).
    `mirrored`: the device is not the host; `secondary`: with hpZ, the ranks that hold a second copy of the parameters;
    `coded`: whether parameters, and gradients, are sent in 8 bits, which the owner keeps, and each rank for its error.
    """
    whole = stay_whole([sum(spec.numel for spec in unit.params) for unit in units], limits or Limits())
    kept = {units[index].name for index in whole}
    gathered = {*gathered, *kept}
    parameters = gradients = optimizer = 0
    for unit, place in zip(units, placements or [_HERE] * len(units), strict=True):
        size, full = ITEMSIZE[unit.dtype], unit.layout.numel
        shard = full // parts
        away = place.params is not Where.DEVICE
        cut = sharding.params and (parts > 1 or away)
        parameters += (0 if away else size * shard) if cut else size * full
        parameters += sum(spec.beside for spec in unit.params)
        parameters += size * full if cut and unit.name in gathered else 0
        travels = cut and parts > 1 and coded[0] and is_updated(unit) and unit.name not in kept
        parameters += wire_nbytes(full) // parts if travels else 0
        parameters += (wire_nbytes(full) if travels else size * full) // secondary if cut and secondary > 1 else 0
        gradients += wire_nbytes(full) if coded[1] and parts > 1 and is_updated(unit) else 0
        if unit.name in local_gradients:
            local = unit.dtype if sharding.grads or accumulation == 1 else accumulate
            gradients += ITEMSIZE[local] * full
        if unit.name in reduced_gradients and place.used_on_device:
            gradients += ITEMSIZE[accumulate] * shard
        if is_updated(unit) and place.optimizer is Where.DEVICE:
            optimizer += size * shard if keeps_copy(place, mirrored) else 0
            optimizer += formats.master_nbytes(shard, unit.dtype)
            own = runs(unit, unit.layout.shard(rank, parts), formats.moments)
            optimizer += sum(formats.of_unit(unit).moments_nbytes(run.numel, run.format) for run in own)
    return StateBytes(parameters, gradients, optimizer)


class InFlight(NamedTuple):
    """Gradient bytes in flight while a unit's backward computes, with its flat buffer, and the peak until its end.

    The peak includes the gradient that autograd delivers, and the unit's messages.
    """

    during: int
    most: int


def in_flight_nbytes(
    units: Sequence[UnitPlan],
    parts: int,
    replicas: int,
    *,
    accumulate: str = "fp32",
    travel: str | None = None,
    collected: bool = False,
    native: bool = False,
    mirrored: bool = False,
) -> list[InFlight]:
    """Bytes of gradients in flight in the backward of each unit: from autograd, and between ranks.

    Frozen units have none. Kept sums and buffers are not counted.
    parts, replicas: sizes of the shard and the replica axis; `travel`: the dtype to which gradients are rounded to be
    sent; `collected`: they come from buffers in which micro-batches add up, in `accumulate`; `native`: NCCL adds
    up; else the slices of all ranks arrive, with NCCL (`mirrored`) also the own one.
    """
    size, sent = parts if parts > 1 else replicas, []
    trained = [index for index, unit in enumerate(units) if is_updated(unit)][::-1]
    for unit in (units[index] for index in trained):
        dtype = travel or (accumulate if collected else unit.dtype)
        # A buffer that is whole on every rank and in fp32 receives the sum, and is counted as the sum.
        stays = collected or (parts == 1 and dtype == accumulate == "fp32")
        nbytes = ITEMSIZE[dtype] * unit.layout.numel
        arriving = nbytes // size if native else nbytes - (0 if mirrored else nbytes // size)
        own = 0 if stays else nbytes
        sizes = [ITEMSIZE[unit.dtype] * spec.numel for spec in unit.params]
        # With small gradients the buffer is allocated when most have come, and the unit's activations are being freed.
        early = own if max(sizes) > TOGETHER or sum(sizes) > 2 * TOGETHER else 0
        sent.append((own + (arriving if size > 1 else 0), own, early, max(sizes), sizes[0]))
    # A unit's messages may take as long as the next unit computes, or the next two if gradients stay anyway.
    width = 3 if replicas > 1 and parts == 1 else 2
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
