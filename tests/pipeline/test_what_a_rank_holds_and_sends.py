"""The promise: a rank has its stages only, gathers and reduces as rarely as it was told, and keeps few micro-batches.

Counted are the events of the engine, in the order in which this rank began them.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from marks import longer
from pipelines import WIDTH, batches, chain, json_of
from torch import nn

import zero
from zero.parallel.pipeline.stage import Stage

MICRO_BATCHES = 8
SPLIT = ("zero_bubble", "zbv")


def noted(json: dict[str, Any]) -> tuple[list[tuple[str, str]], int, list[str], int]:
    """(verb, of what) of one step behind the first two; the most micro-batches alive; names of parameters; bytes."""
    engine = zero.initialize(model=chain(), config=json, loss_fn=nn.functional.cross_entropy)[0]
    stream, events, alive, kept = batches(engine.get_data_parallel_rank()), [], [0], Stage.keep
    for _ in range(2):
        engine.train_batch(stream)

    def span(verb: str, of: str) -> Any:
        events.append((verb, of))
        return contextlib.nullcontext()

    def keep(stage: Stage, *args: Any) -> None:
        kept(stage, *args)
        here = engine._training.model._runner.stages.values()
        alive[0] = max(alive[0], sum(len(each.alive) for each in here))

    end = engine._sharded.world.watchdog.events.subscribe(span)
    Stage.keep = keep
    engine.train_batch(stream)
    Stage.keep = kept
    end()
    names = [name for name, _ in engine.module.named_parameters()]
    states = engine.state_nbytes()
    engine.destroy()
    return events, alive[0], names, states.parameters


def counted(found: Any, verb: str) -> set[int]:
    """How often the verb was said of each unit."""
    return set(Counter(of for each, of in found[0] if each == verb).values())


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", *longer("gpipe", "interleaved", "zero_bubble", "dualpipev")])
@pytest.mark.parametrize("stage", [3, *longer(1, 2)])
def test_gathered_once_a_step_and_reduced_once(pool, schedule, stage):
    section = {"stages": 2, "schedule": schedule}
    for found in pool.run(4, noted, json_of(stage, 2, MICRO_BATCHES, pipeline=section)):
        assert counted(found, "reduce") == {1}
        assert counted(found, "gather") == ({1} if stage == 3 else set()) or stage < 3


@pytest.mark.parametrize("schedule", ["1f1b", *longer("gpipe", "interleaved", "zbv")])
def test_gathered_for_each_use_and_reduced_after_each_micro_batch(pool, schedule):
    section = {"stages": 2, "schedule": schedule, "gather": "use"}
    for found in pool.run(4, noted, json_of(3, 2, MICRO_BATCHES, pipeline=section)):
        assert counted(found, "reduce") == {MICRO_BATCHES}
        # A unit stays where its next use is near: at most one gather for each forward and each part of a backward, and
        # one ahead of a use that the end of the step does not see.
        assert MICRO_BATCHES <= min(counted(found, "gather")) <= max(counted(found, "gather")) <= 3 * MICRO_BATCHES + 1


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", [8, 8]), ("1f1b", [2, 1])])
def test_micro_batches_that_are_alive(pool, schedule, most):
    found = pool.run(2, noted, json_of(0, 1, MICRO_BATCHES, pipeline={"stages": 2, "schedule": schedule}))
    assert [alive for _, alive, _, _ in found] == most


@pytest.mark.parametrize("schedule", ["1f1b", *longer("interleaved", "zbv")])
def test_a_rank_has_the_names_and_bytes_of_its_stages(pool, schedule):
    found = pool.run(2, noted, json_of(1, 1, MICRO_BATCHES, pipeline={"stages": 2, "schedule": schedule}))
    whole = dict(chain().named_parameters())
    assert sorted(found[0][2] + found[1][2]) == sorted(whole)
    for _, _, names, nbytes in found:
        own = sum(whole[name].nbytes for name in names)
        assert own <= nbytes <= own + 64 * WIDTH  # units are padded


def test_a_gather_is_on_its_way_before_it_is_needed_and_a_reduction_while_others_compute(pool):
    """The unit of a stage's last layer begins to be gathered before its first one computes; and as stages follow each
    other on a rank, the gradients of one are on the way while the next one still has its backward."""
    section = {"stages": 2, "schedule": "interleaved"}
    for events, *_ in pool.run(4, noted, json_of(3, 2, MICRO_BATCHES, pipeline=section)):
        verbs = [verb for verb, _ in events]
        assert verbs.index("gather") < verbs.index("F")
        first = verbs.index("F")
        assert verbs[:first].count("gather") == verbs.count("gather")
        assert "B" in verbs[verbs.index("reduce") :]


def kept(json: dict[str, Any]) -> int:
    """Inputs of three steps that are there behind them, while Python looks for no circles."""
    engine = zero.initialize(model=chain(), config=json, loss_fn=nn.functional.cross_entropy)[0]
    seen = []

    def stream() -> Iterator[Any]:
        for x, y in batches(0):
            seen.append(weakref.ref(x))
            yield x, y

    data = stream()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            engine.train_batch(data)
        return sum(each() is not None for each in seen)
    finally:
        gc.enable()
        engine.destroy()


def test_batches_of_earlier_steps_are_gone(pool):
    """But the last one, which the loop of the stream has."""
    assert pool.run(2, kept, json_of(1, 1, MICRO_BATCHES, pipeline={"stages": 2})) == [1, 1]
