"""The promise: whatever the schedule and the ZeRO stage, stages over ranks train to the bits of one process.

Also where messages are NCCL's, which wait on the device and have no tags.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from device import moved
from fake_nccl import FakeNccl, on_fake_nccl
from marks import longer
from pipelines import Found, accumulated, compare, json_of, pipelined

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
MICRO_BATCHES = 8
WAYS = {"pp 2": (2, 2), "pp 4": (4, 4), "pp 2 x dp 2": (2, 4)}  # stages, ranks
AXES = tuple(map(tuple, (SCHEDULES, range(4), WAYS, ("fp32", "bf16"), ("use", "step"))))
# Each value of each axis.
SHORT = [tuple(axis[at % len(axis)] for axis in AXES) for at in range(len(SCHEDULES))]
ALL = [case for case in itertools.product(*AXES) if case not in SHORT]


@pytest.mark.parametrize(("schedule", "stage", "way", "precision", "gather"), [*SHORT, *longer(*ALL)])
def test_a_schedule_trains_as_one_process_does(pool: Any, schedule, stage, way, precision, gather):
    stages, ranks = WAYS[way]
    data = ranks // stages
    section = {"stages": stages, "schedule": schedule, "gather": gather}
    # Stages 2 and 3 reduce each micro-batch; a schedule that gathers once reduces once, as stage 0 and 1 do.
    alike = stage if gather == "use" else min(stage, 1)
    plain = json_of(alike, data, MICRO_BATCHES, precision)
    found = pool.run(ranks, pipelined, json_of(stage, data, MICRO_BATCHES, precision, pipeline=section))
    compare(found, pool.run(data, accumulated, plain)[0])


def native(json: dict[str, Any]) -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        found = moved(tuple(pipelined(json)), torch.device("cpu"))
        texts = [text for made in FakeNccl.made for text in made.begun]
        assert "batch" in texts and not {"send", "recv"} & {*texts}, "for which NCCL makes communicators of two ranks"
        return found


@pytest.mark.parametrize("schedule", ["1f1b", *longer("gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev")])
@pytest.mark.parametrize("gather", ["step", *longer("use")])
def test_a_schedule_over_nccl_trains_as_one_process_does(pool: Any, schedule: str, gather: str) -> None:
    json = json_of(3, 2, 8, pipeline={"stages": 2, "schedule": schedule, "gather": gather})
    found = [Found(*each) for each in pool.run(4, native, json)]
    compare(found, pool.run(2, accumulated, json_of(3 if gather == "use" else 1, 2, 8))[0])
