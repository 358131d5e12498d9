"""Schedules: what each rank along pp does in one step, as torch's classes say it."""

from __future__ import annotations

import functools

from zero.config import Config
from zero.config.pipeline import STYLES
from zero.parallel.pipeline.torch_private import pipeline_orders
from zero.plan.pipeline import Action, Kind, Schedule, single_order


def of_section(settings: Config, batches: int = 0) -> Schedule:
    """The schedule that the JSON says; of so many batches, by default those of one schedule."""
    section = settings.pipeline
    size = settings.train_micro_batch_size_per_gpu
    batches = batches or section.micro_batches or settings.gradient_accumulation_steps
    count = batches * -(-size // (section.split_size or size))
    per_rank = STYLES[section.schedule].per_rank or section.stages_per_rank or 2
    return make_schedule(section.schedule, settings.grid.size("pp"), count, per_rank)


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
