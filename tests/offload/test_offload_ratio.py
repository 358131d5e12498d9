"""The promise: `"ratio": "auto"` keeps what fits on the device, alike on all ranks, says so, and changes no number."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from models import config, make_net, train

import zero
import zero.core.ratio
from zero.config import ConfigError, load
from zero.core.ratio import fitting
from zero.plan.formats import Formats
from zero.plan.layout import make_layout
from zero.plan.placement import Where, place
from zero.plan.units import ParamSpec, UnitPlan

FORMATS = Formats("remainder")
BYTES = 2 + 8 + 2  # of one bf16 element on the device: remainder, both moments, gradient


def settings_of(ratio: Any, kind: str = "cpu", folder: str | None = None) -> dict[str, Any]:
    section = {"stage": 2, "offload_optimizer": {"device": kind, "ratio": ratio, "nvme_path": folder}}
    return config(2, dist.get_world_size(), zero_optimization=section)


def auto(free: list[int], kind: str, folder: str | None) -> tuple[list[bool], list[str], dict[str, Any]]:
    """Which units stay on the device where rank r has `free[r]` bytes, what was logged, and a training."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("zero").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.core.ratio, "available_nbytes", lambda ranks: free[dist.get_rank()])
        engine, *_ = zero.initialize(model=make_net(), config=settings_of("auto", kind, folder))
        stay = [not unit.shard.placement.updated_on_host for unit in engine._sharded.trained]
        engine.destroy()
        trained = train(make_net(), 2, settings_of("auto", kind, folder))
    logging.getLogger("zero").removeHandler(handler)
    return stay, [text for text in messages if "ratio 'auto'" in text], trained


def fixed(ratio: float) -> dict[str, Any]:
    return train(make_net(), 2, settings_of(ratio))


@pytest.mark.parametrize(("free", "stays"), [([1 << 40, 1 << 40], True), ([1 << 40, 1000], False)])
def test_all_ranks_choose_by_the_one_with_the_least_memory(pool, tmp_path, free, stays):
    found = pool.run(2, auto, free, "nvme", str(tmp_path))
    assert all(stay == [stays] * 4 for stay, _, _ in found)
    message = found[0][1][0]
    assert f"ratio {'0' if stays else '1'}," in message and "(40%) for activations" in message
    assert not found[1][1], "one rank logs"
    for (_, _, got), wanted in zip(found, pool.run(2, fixed, 1.0), strict=True):
        assert got["losses"] == wanted["losses"]
        assert all(torch.equal(got["params"][name], wanted["params"][name]) for name in wanted["params"])


def test_nothing_stays_where_host_and_device_share_one_memory(pool):
    for stay, _, _ in (found := pool.run(2, auto, [1 << 40, 1 << 40], "cpu", None)):
        assert stay == [False] * 4
    assert "state takes the same memory on either side. Chosen: ratio 1, 0 parameters" in found[0][1][0]


def section(ratio: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": ratio}},
    }


def test_the_key_takes_a_number_or_the_word():
    for value, kept in (("auto", "auto"), (0.5, 0.5), (1, 1.0)):
        assert load(section(value), 1).zero_optimization.offload_optimizer.ratio == kept
    for wrong in ("half", 1.5, -0.1, True, None, math.nan):
        wanted = "zero_optimization.offload_optimizer.ratio: got .*, wanted a number from 0 to 1, or 'auto'"
        with pytest.raises(ConfigError, match=wanted):
            load(section(wrong), 1)


def units_of(*sizes: int) -> list[UnitPlan]:
    specs = [ParamSpec(f"u{index}.weight", numel, "bf16", True, 0, 2) for index, numel in enumerate(sizes)]
    return [UnitPlan(spec.name, spec.name, (spec,), make_layout({spec.name: spec.numel}, 1)) for spec in specs]


def test_as_many_units_stay_as_fit():
    units = units_of(*[1 << 20] * 8)
    for count in range(9):
        ratio, numel, _ = fitting(units, 1, FORMATS, "bf16", (count + 0.5) * BYTES * (1 << 20))
        placements = place(units, 1, Where.HOST, Where.DEVICE, ratio)
        assert [at.optimizer is Where.DEVICE for at in placements] == [True] * count + [False] * (8 - count)
        assert numel == count << 20
    assert fitting([], 1, FORMATS, "bf16", 1e9)[0] == 1.0


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=60), part=st.floats(0, 1))
def test_the_room_is_never_exceeded(sizes: list[int], part: float) -> None:
    units = units_of(*sizes)
    room = part * sum(unit.layout.numel for unit in units) * BYTES
    ratio, numel, nbytes = fitting(units, 1, FORMATS, "bf16", room)
    placements = place(units, 1, Where.FILE, Where.DEVICE, ratio)
    stay = [unit for unit, at in zip(units, placements, strict=True) if at.optimizer is Where.DEVICE]
    assert numel == sum(unit.layout.numel for unit in stay)
    assert nbytes <= room
