"""From a model to the stages of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zero.core.owner import owner_of, share_along
from zero.core.sharded_module import ShardedModule
from zero.parallel.pipeline.partition import divide
from zero.parallel.pipeline.schedule import make_schedule, stages_per_rank
from zero.parallel.pipeline.split import Divided
from zero.parallel.pipeline.stage import Stage
from zero.plan.grid import DENSE
from zero.plan.pipeline import Schedule


@dataclass
class Pipelined:
    """A model whose stages are divided among ranks; this rank has those that are `here`.

    places: of each stage, the rank along pp that has it; one_input: the model is called with one value, which may be a
    tuple; loss_fn: from the model's output and a target to the loss, None where the model computes its own;
    elsewhere: parameters that were the model's, and are of other ranks.
    """

    divided: Divided
    style: str
    per_rank: int
    places: tuple[int, ...]
    here: tuple[int, ...]
    one_input: bool
    loss_fn: Callable[..., Any] | None = None
    elsewhere: set[nn.Parameter] = field(default_factory=set)

    def schedule(self, micro_batches: int) -> Schedule:
        """That of so many micro-batches."""
        return make_schedule(self.style, len(set(self.places)), micro_batches, self.per_rank)

    def stages(self, sharded: ShardedModule) -> list[Stage]:
        """The stages here, of which units have the parameters by now."""
        found = []
        for index in self.here:
            params = [param for param, stages in self.divided.readers().items() if index in stages]
            units = list(
                {owner.unit.index: owner.unit for owner in map(owner_of, params) if owner is not None}.values()
            )
            found.append(Stage(index, self.divided.run, sorted(units, key=lambda unit: unit.index)))
        return found


def pipelined(
    model: nn.Module,
    style: str,
    per_rank: int | None,
    places: int,
    place: int,
    micro_batches: int,
    how: Mapping[str, Any],
) -> Pipelined:
    """Divide a model among `places` ranks along pp, of which this is number `place`; changes the model.

    how: `partition`, None where nothing is said, and `said`, as of `divide`. ValueError for what cannot be divided.
    """
    per_rank = stages_per_rank(style, per_rank)
    schedule = make_schedule(style, places, micro_batches, per_rank)
    divided = _divided(model, places * per_rank, **how)
    _tie(divided, schedule)
    before = set(model.parameters())
    here = schedule.stages(place)
    divided.prune(here)
    one_input = isinstance(model, nn.Sequential) or not isinstance(divided, Divided)
    elsewhere = before - set(model.parameters())
    return Pipelined(divided, style, per_rank, schedule.places, here, one_input, elsewhere=elsewhere)


def _divided(model: nn.Module, stages: int, partition: Any, said: Mapping[str, int]) -> Divided:
    in_stages = getattr(model, "in_stages", None)  # of a PipelineModule, which knows its layers
    if in_stages is not None:
        return in_stages(stages, partition, said)
    return Divided(model, divide(model, stages, partition or "parameters", said), stages)


def _tie(divided: Divided, schedule: Schedule) -> None:
    """Have parameters that several stages read be summed over the ranks that have these."""
    for param, stages in divided.readers().items():
        if len(where := sorted({schedule.places[stage] for stage in stages})) > 1:
            share_along(DENSE._replace(sums=(f"pp:{','.join(map(str, where))}",)), [param])
