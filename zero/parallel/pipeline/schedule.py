"""Schedules: what each rank along pp does in one step, as torch's classes say it."""

from __future__ import annotations

import functools

from zero.config.pipeline import STYLES
from zero.parallel.pipeline.torch_private import pipeline_orders
from zero.plan.pipeline import Action, Kind, Schedule, single_order


def stages_per_rank(style: str, given: int | None) -> int:
    """How many stages each rank has, where the schedule leaves it open as many as `given`."""
    return STYLES[style].per_rank or given or 2


@functools.lru_cache
def make_schedule(style: str, places: int, micro_batches: int, per_rank: int) -> Schedule:
    """The schedule of so many micro-batches over `places` ranks; ValueError where there is none."""
    computed = single_order(style, places, micro_batches) if not STYLES[style].made_by else [[]] * places
    plain = [[(each.stage, each.kind.value, each.micro_batch) for each in order] for order in computed]
    try:
        orders, where = pipeline_orders(STYLES[style].made_by, plain, per_rank, micro_batches)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"pipeline.schedule: '{style}' over {places} ranks of {per_rank} stages cannot run {micro_batches} "
            f"micro-batches a step; set gradient_accumulation_steps to a multiple of {2 * places}, or take '1f1b', "
            f"which runs any number. Torch says: {error}"
        ) from None
    actions = (tuple(Action(Kind(kind), stage, number) for stage, kind, number in order) for order in orders)
    return Schedule(style, micro_batches, tuple(where), tuple(actions))
