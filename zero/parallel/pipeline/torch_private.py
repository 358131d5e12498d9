"""Every private name of torch that pipelines use, with what we need of it: schedules."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from zero.core.torch_private import require_torch


def pipeline_orders(
    made_by: str, compute: Sequence[Sequence[tuple[int, str, int]]], per_rank: int, micro_batches: int
) -> tuple[list[list[tuple[int, str, int]]], list[int]]:
    """Of each rank along pp, what a schedule of torch does, as (stage, kind, micro-batch or -1); and each stage's rank.

    `made_by`: a class of schedules; or "", and `compute` has what each rank computes, to which messages are added.
    ValueError where the class cannot have so many micro-batches.
    """
    require_torch((2, 13), "pipelines")
    from torch.distributed.pipelining import schedules  # imports much

    places = len(compute)

    def stage(index: int) -> Any:  # all that a schedule asks of a stage before it runs
        said = {"stage_index": index, "num_stages": places * per_rank, "group_size": places, "group_rank": 0}
        return types.SimpleNamespace(**said, is_first=not index, is_last=index == places * per_rank - 1, submod=None)

    stages, kinds = [stage(index) for index in range(per_rank)], schedules._ComputationType
    if made_by:
        schedule = getattr(schedules, made_by)(stages, micro_batches, loss_fn=bool)
    else:
        schedule = schedules._PipelineScheduleRuntime(stages, micro_batches, loss_fn=bool)
        orders = {
            place: [schedules._Action(at, kinds(kind), number) for at, kind, number in order]
            for place, order in enumerate(compute)
        }
        schedule._prepare_schedule_with_comms(orders)
    found: list[list[tuple[int, str, int]]] = []
    for _, order in sorted(schedule.pipeline_order_with_comms.items()):
        single = (each for action in order for each in (action.sub_actions or (action,)))
        numbers = ((each, each.microbatch_index) for each in single)
        found.append(
            [(each.stage_index, each.computation_type.value, -1 if at is None else at) for each, at in numbers]
        )
    where = schedule.stage_index_to_group_rank
    return found, [where[at] for at in range(places * per_rank)]
