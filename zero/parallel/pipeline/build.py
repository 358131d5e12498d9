"""Dividing a model into stages, of which this rank keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from zero.config import Config
from zero.core.owner import owner_of, share_along
from zero.parallel.pipeline.partition import divide
from zero.parallel.pipeline.schedule import make_schedule, of_section
from zero.parallel.pipeline.split import Divided, Elsewhere
from zero.parallel.pipeline.stage import Stage
from zero.parallel.pipeline.trunk import Trunk, is_pretrained
from zero.plan.grid import DENSE
from zero.plan.pipeline import Schedule


@dataclass
class Pipelined:
    """A model whose stages are divided among ranks; this rank has those that are `here`.

    schedule: of as many micro-batches as the JSON says; one_input: the model is called with one value, which may be a
    tuple; loss_fn: from the model's output and a target to the loss, None where the model computes its own;
    elsewhere: parameters that were the model's, and are of other ranks.
    """

    divided: Divided
    schedule: Schedule
    here: tuple[int, ...]
    one_input: bool
    loss_fn: Callable[..., Any] | None
    elsewhere: set[nn.Parameter]

    @property
    def places(self) -> tuple[int, ...]:
        """The rank along pp of each stage."""
        return self.schedule.places

    def schedule_of(self, micro_batches: int) -> Schedule:
        """This schedule, for so many micro-batches."""
        known = self.schedule
        return make_schedule(known.style, len(known.orders), micro_batches, len(known.places) // len(known.orders))

    def stages(self) -> list[Stage]:
        """The stages here, of which units have the parameters by now."""
        found = []
        for index in self.here:
            owners = (owner_of(param) for param, stages in self.divided.readers().items() if index in stages)
            units = {owner.unit.index: owner.unit for owner in owners if owner is not None}
            found.append(Stage(index, self.divided.run, [unit for _, unit in sorted(units.items())]))
        return found


def pipelined(
    model: nn.Module,
    settings: Config,
    place: int,
    loss_fn: Callable[..., Any] | None,
    call: Callable[[], Any] | None,
) -> Pipelined:
    """Divide a model among the ranks along pp, of which this is number `place`; changes it. call: as of `divide`."""
    schedule = of_section(settings)
    divided = _divided(model, len(schedule.places), settings, call)
    _tie(divided, schedule)
    before, here = set(model.parameters()), schedule.stages(place)
    divided.prune(here)
    one_input = isinstance(model, nn.Sequential) or not isinstance(divided, Divided)
    elsewhere = before - set(model.parameters())
    return Pipelined(divided, schedule, here, one_input, loss_fn, elsewhere)


def _divided(model: nn.Module, stages: int, settings: Config, call: Callable[[], Any] | None) -> Any:
    if any(isinstance(each, Elsewhere) for each in model.modules()):
        raise ValueError(
            "initialize(): an engine has divided this model before, and a part of it is left; make it anew"
        )
    section = settings.pipeline
    said = section.partition if "partition" in section.model_fields_set else None
    in_stages = getattr(model, "in_stages", None)  # of a PipelineModule, which knows its layers
    if in_stages is not None:
        return in_stages(stages, said, section.stage_map, call)
    stage_of = divide(model, stages, section.partition, section.stage_map, call)
    return (Trunk if is_pretrained(model) else Divided)(model, stage_of, stages)


def _tie(divided: Divided, schedule: Schedule) -> None:
    """Have parameters that several stages read be summed over the ranks that have these."""
    for param, stages in divided.readers().items():
        if len(where := sorted({schedule.places[stage] for stage in stages})) > 1:
            share_along(DENSE._replace(sums=(f"pp:{','.join(map(str, where))}",)), [param])
