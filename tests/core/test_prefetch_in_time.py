"""The promise: with `zero.prefetch` "time" units are gathered as early as gathers take, on all ranks alike.

Time is a clock that the test sets: a gather and a block take what the case says, on rank 1 something else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from marks import longer
from models import config, make_net, step
from test_lifetime import Recorder

import zero
from zero.core.state import State
from zero.core.unit import Unit
from zero.monitor import use_times

BLOCK = 661  # elements
BLOCKS = 4


class Clock:
    """Goes on by what the case says, and else stands still; a rank other than 0 sees gathers that last for ever."""

    def __init__(self, patch: pytest.MonkeyPatch, gathers: dict[str, float]) -> None:
        self.time = 0.0
        wait, reduce, late = Unit.wait, Unit.reduce, 1000.0 * dist.get_rank()

        def timed_wait(unit: Unit) -> None:
            self.time += gathers.get(unit.plan.name, 0.1) + late if unit.state is State.GATHERING else 0.0
            wait(unit)

        def timed_reduce(unit: Unit, *leaf: Any) -> None:
            reduce(unit, *leaf)
            self.time += 20.0

        patch.setattr(use_times, "now", lambda device: self.time)
        patch.setattr(Unit, "wait", timed_wait)
        patch.setattr(Unit, "reduce", timed_reduce)

    def compute(self, *_: Any) -> None:
        self.time += 10.0


def verbs(section: dict[str, Any], gathers: dict[str, float], prefetch: str, steps: int) -> tuple[list[str], list[int]]:
    """Gathers and waits of the last step, and the numbers of messages in each step."""
    settings = config(3, dist.get_world_size(), zero={"prefetch": prefetch, "check_order": True})
    settings["zero_optimization"].update(section)
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch, gathers)
        engine, *_ = zero.initialize(model=make_net(blocks=BLOCKS), config=settings)
        for block in engine.module.blocks:
            block.register_forward_pre_hook(clock.compute)
        recorder = Recorder(patch)
        sent = []
        for index in range(steps):
            recorder.take()
            step(engine, index)
            found, traffic = recorder.take()
            sent.append(len(traffic))
        left = "use" in vars(engine._sharded.prefetcher), len(engine._sharded.reducer.on_flush)
        engine.destroy()
    assert prefetch == "elements" or left[0] is False
    return [verb.replace("blocks.", "") for verb in found if verb.startswith(("gather", "wait"))], sent


ONE_AHEAD = [
    *("gather <root>", "wait <root>", "gather 0", "wait 0", "gather 1", "wait 1", "gather 2", "wait 2"),
    *("gather 3", "wait 3", "gather 3", "wait 3", "gather 2", "wait 2", "gather 1", "wait 1", "gather 0", "wait 0"),
]
LAST_IS_SLOW = [  # 18 s with the margin, of a block that is used 10 s after the last one before it
    *("gather <root>", "wait <root>", "gather 0", "wait 0", "gather 1", "wait 1", "gather 2", "gather 3", "wait 2"),
    *("wait 3", "gather 3", "wait 3", "gather 2", "wait 2", "gather 1", "wait 1", "gather 0", "wait 0"),
]


@pytest.mark.parametrize(
    ("section", "gathers", "expected"),
    [
        ({}, {"blocks.3": 9.0}, LAST_IS_SLOW),
        *longer(
            ({}, {}, ONE_AHEAD),
            ({"stage3_prefetch_bucket_size": 2 * BLOCK - 1}, {"blocks.3": 9.0}, ONE_AHEAD),
        ),
    ],
)
def test_gathers_come_when_they_must(pool, section, gathers, expected):
    for found, sent in pool.run(2, verbs, section, gathers, "time", 4):
        assert found == expected
        assert sent[2:] == [sent[1]] * 2


def test_until_the_times_are_known_the_limits_say_how_far_ahead(pool):
    early = pool.run(2, verbs, {}, {}, "time", 3)
    assert early == pool.run(2, verbs, {}, {}, "elements", 3)
    assert early[0][0][:6] == ["gather <root>", "wait <root>", *(f"gather {block}" for block in range(BLOCKS))]
