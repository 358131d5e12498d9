"""A stage, a placement and a mesh, which `zero plan` chooses between; and what that means for the units of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from zero.config import Config
from zero.plan.formats import ITEMSIZE, Formats, resting_dtype
from zero.plan.memory import Scheme
from zero.plan.order import ForeseenUse, Limits, uses
from zero.plan.placement import Where, place
from zero.plan.sharding import Sharding, summed_here
from zero.plan.units import Parts, UnitPlan, of_each

DEVICE, HOST, FILE = Where.DEVICE.value, Where.HOST.value, Where.FILE.value


class StageChoice(NamedTuple):
    """A stage, where optimizer state and parameters rest, in the words of the JSON, and the mesh.

    shard_size: ranks that state is sharded over (`zero.shard_size`), 0 for all; secondary: those that hold a second
    copy of the parameters (`zero_hpz_partition_size`), 1 for none.
    """

    stage: int
    optimizer: str = DEVICE
    params: str = DEVICE
    shard_size: int = 0
    secondary: int = 1

    def __str__(self) -> str:
        places = {HOST: "host", FILE: "drive"}
        if self.optimizer == self.params != DEVICE:
            away = [f"optimizer and parameters on {places[self.params]}"]
        else:
            named = ("optimizer", self.optimizer), ("parameters", self.params)
            away = [f"{what} on {places[at]}" for what, at in named if at in places]
        mesh = [f"HSDP {self.shard_size}"] if self.shard_size else []
        mesh += [f"hpZ {self.secondary}"] if self.secondary > 1 else []
        return ", ".join([str(self.stage), *away, *mesh])


CHOICES = (
    *(StageChoice(stage) for stage in range(4)),
    *(StageChoice(stage, HOST) for stage in (1, 2, 3)),
    *(StageChoice(3, at, at) for at in (HOST, FILE)),
)


def own_choice(settings: Config) -> StageChoice:
    """The one that the configuration makes."""
    section = settings.zero_optimization
    places = section.offload_optimizer.device, section.offload_param.device
    return StageChoice(section.stage, *places, settings.shard_size, settings.secondary_shard_size)


def scheme_of(
    units: Sequence[UnitPlan],
    settings: Config,
    choice: StageChoice,
    formats: Formats,
    accumulation: int,
    mirrored: bool,
    per_host: int | None = None,
    streamed: bool | None = None,
) -> Scheme:
    """What a choice means under the settings, whose own stage, placement, mesh and micro-batches do not count.

    formats: of the optimizer's state. per_host: ranks on each host, all of them by default. streamed: whether a GPU
    updates state that rests off it; None: what the settings say, also where they may.
    """
    section, zero = settings.zero_optimization, settings.zero
    sharding = Sharding.of_stage(choice.stage, settings.reduces_each, settings.managed_gradient_accumulation)
    once = settings.grid.size("pp") > 1 and settings.pipeline.gather == "step"
    if once and not settings.reduces_each:  # gradients add up over a schedule
        sharding = replace(sharding, grads=False)
    parts = (choice.shard_size or settings.summed) if sharding.optim else 1
    parts_of, replicas = _of_each(units, settings, parts, sharding.optim)
    accumulate, travel = settings.data_types.grad_accum_dtype or "fp32", settings.communication_data_type
    state, limits = section.offload_optimizer, Limits.of_section(section)
    ratio = 1.0 if state.ratio == "auto" else state.ratio
    where = Where(choice.optimizer), Where(choice.params)
    streamed = mirrored and (state.zero.update != "host" if streamed is None else streamed)
    collected = accumulation > 1 and not sharding.grads
    sent = travel or (accumulate if collected else settings.compute_dtype)
    cut = parts > 1
    coded = cut and sharding.params and section.zero_quantized_weights, cut and section.zero_quantized_gradients
    together = per_host is None or (parts if parts > 1 else settings.summed) <= per_host
    native = mirrored and not coded[1] and ITEMSIZE[sent] > summed_here(zero.reduce, together)
    alone = settings.summed_together == 1
    rounded = accumulation == 1 and (alone or native) and zero.reduce != "tree" and travel is None
    resharded = [sharding.params and (own > 1 or choice.params != DEVICE) for own in of_each(parts_of, units)]
    return Scheme(
        sharding=sharding,
        parts=parts_of,
        replicas=replicas,
        secondary=choice.secondary,
        formats=formats,
        accumulation=accumulation,
        accumulate=accumulate,
        resting=resting_dtype(settings.compute_dtype, accumulate, rounded),
        travel=travel,
        limits=limits,
        placements=place(units, parts_of, *where, ratio, section.offload_param.max_in_cpu, streamed),
        mirrored=mirrored,
        native=native,
        coded=coded,
        uses=_uses(units, resharded, limits, once),
    )


def _uses(units: Sequence[UnitPlan], resharded: Sequence[bool], limits: Limits, once: bool) -> list[ForeseenUse]:
    """The uses of a micro-batch, of units of which some are gathered for each, or `once` for a step."""
    nbytes = [ITEMSIZE[unit.dtype] * unit.layout.numel * cut for unit, cut in zip(units, resharded, strict=True)]
    sizes = [sum(spec.numel for spec in unit.params) for unit in units]
    found = uses([unit.anchor for unit in units], sizes, nbytes, limits)
    found = [use._replace(whole=sum(nbytes)) for use in found] if once else found
    return [use._replace(gathered=use.gathered and resharded[use.unit]) for use in found]


def _of_each(units: Sequence[UnitPlan], settings: Config, parts: int, sharded: bool) -> tuple[Parts, Parts]:
    """Ranks along shard and replica, for all units, or for each where experts have others than dense ones."""
    tp, ep, replicas = settings.grid.size("tp"), settings.grid.size("ep"), max(1, settings.summed_together // parts)
    if tp == ep or not any("ep" in unit.axes.parts for unit in units):
        return parts, replicas
    size = parts if sharded else replicas
    found = [size * tp // ep if "ep" in unit.axes.parts else size for unit in units]
    return (found, replicas) if sharded else (parts, found)
