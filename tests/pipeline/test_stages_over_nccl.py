"""The promise: stages train to the same bits where messages are NCCL's, which wait on the device and have no tags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device import moved
from fake_nccl import FakeNccl, on_fake_nccl
from marks import longer
from pipelines import Found, accumulated, compare, json_of, pipelined


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
