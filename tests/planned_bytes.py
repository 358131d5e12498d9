"""What an engine shall keep, byte by byte, from the plan alone: beside it tests put what an engine really keeps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zero.plan.formats import ITEMSIZE, Formats, runs
from zero.plan.memory import ADAM, StateBytes
from zero.plan.order import Limits, stay_whole
from zero.plan.placement import Placement, Where, is_updated, keeps_copy
from zero.plan.sharding import Sharding
from zero.plan.units import UnitPlan

_HERE = Placement(Where.DEVICE, Where.DEVICE)


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
) -> StateBytes:
    """Bytes this engine keeps on one rank at a moment that is told by names of units.

    `parts` is the size of the shard axis, `rank` the place on it; shards differ where only the moments of large
    parameters are in fewer bits. `gathered`: units whose parameters are full although they are cut between uses;
    `local_gradients`: units with a full gradient buffer of this rank; `reduced_gradients`: units whose reduced
    shard exists; `accumulate`: the dtype in which gradients add up; `limits` say which units stay whole all the time.
    `placements`: where the state of each unit rests; what is off the device is not counted (`host_bytes` counts it).
    `mirrored`: the device is not the host.
    """
    whole = stay_whole([sum(spec.numel for spec in unit.params) for unit in units], limits or Limits())
    gathered = {*gathered, *(units[index].name for index in whole)}
    parameters = gradients = optimizer = 0
    for unit, place in zip(units, placements or [_HERE] * len(units), strict=True):
        size, full = ITEMSIZE[unit.dtype], unit.layout.numel
        shard = full // parts
        away = place.params is not Where.DEVICE
        cut = sharding.params and (parts > 1 or away)
        parameters += (0 if away else size * shard) if cut else size * full
        parameters += size * full if cut and unit.name in gathered else 0
        if unit.name in local_gradients:
            local = unit.dtype if sharding.grads or accumulation == 1 else accumulate
            gradients += ITEMSIZE[local] * full
        if place.optimizer is not Where.DEVICE:
            continue
        if unit.name in reduced_gradients:
            gradients += ITEMSIZE[accumulate] * shard
        if is_updated(unit):
            optimizer += size * shard if keeps_copy(place, mirrored) else 0
            optimizer += formats.master_nbytes(shard, unit.dtype)
            own = runs(unit, unit.layout.shard(rank, parts), formats.moments)
            optimizer += sum(formats.moments_nbytes(run.numel, run.format) for run in own)
    return StateBytes(parameters, gradients, optimizer)
