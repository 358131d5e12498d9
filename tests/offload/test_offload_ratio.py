"""The promise: `"ratio": "auto"` is measured at the start, chosen alike on all ranks, said, and changes no number."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import config, make_net, train

import zero
import zero.core.ratio
from zero.config import ConfigError, load
from zero.core.mesh import make_mesh
from zero.core.offload import OffloadSettings
from zero.memory.measured import measure
from zero.plan.formats import Formats
from zero.plan.layout import make_layout
from zero.plan.placement import Where
from zero.plan.ratio import Rates, Sizes, choose_ratio
from zero.plan.sharding import Sharding
from zero.plan.units import ParamSpec, UnitPlan

CPU = torch.device("cpu")
# Of machines that were made up: the host as fast as the device, and much slower on the second rank.
ALIKE, SLOW_HOST = Rates(host_update=1e9, device_update=1e9), Rates(host_update=1e6, device_update=1e9)


def settings_of(ratio: Any) -> dict[str, Any]:
    section = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    return config(2, dist.get_world_size(), zero_optimization=section)


def chosen(rates: list[Rates]) -> tuple[list[bool], list[str], dict[str, Any]]:
    """Which units stay on the device where rank r measured `rates[r]`, what was logged, and a training."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("zero").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.core.ratio, "measure", lambda *args: rates[dist.get_rank()])
        engine, *_ = zero.initialize(model=make_net(), config=settings_of("auto"))
        stay = [not unit.placement.updated_on_host for unit in engine._sharded.trained]
        engine.destroy()
        trained = train(make_net(), 2, settings_of("auto"))
    logging.getLogger("zero").removeHandler(handler)
    return stay, [text for text in said if "ratio 'auto'" in text], trained


@pytest.mark.parametrize(("rates", "stays"), [([ALIKE, ALIKE], False), ([ALIKE, SLOW_HOST], True)])
def test_all_ranks_choose_by_the_slowest(pool, rates, stays):
    found = pool.run(2, chosen, rates)
    assert all(stay == [stays] * 4 for stay, _, _ in found)
    said = found[0][1][0]
    number = "0" if stays else "1"
    assert f"ratio {number}," in said and "million parameters a second" in said
    assert "nothing has to be copied; state takes the same memory on either side" in said
    assert not found[1][1], "one rank tells"


def test_numbers_stay_those_of_any_other_ratio(pool):
    plain = pool.run(2, trained_with, 1.0)
    for rates in ([ALIKE, ALIKE], [SLOW_HOST, ALIKE]):
        for (_, _, got), wanted in zip(pool.run(2, chosen, rates), plain, strict=True):
            assert got["losses"] == wanted["losses"]
            assert all(torch.equal(got["params"][name], wanted["params"][name]) for name in wanted["params"])


def trained_with(ratio: Any) -> dict[str, Any]:
    return train(make_net(), 2, settings_of(ratio))


@pytest.mark.parametrize("format", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("states", [0, 1, 2])
def test_every_format_is_measured(format, states):
    for dtype, master in ((torch.float32, "fp32"), (torch.bfloat16, "remainder"), (torch.float16, "fp32")):
        rates = measure(CPU, dtype, Formats(master, format, states), 2, 1 << 12)
        assert 0 < rates.host_update < math.inf and 0 < rates.device_update < math.inf
        assert rates.up == rates.down == math.inf, "one memory, nothing to copy"


def test_this_machine_is_measured_for_real(pool):
    stays = pool.run(2, measured_here)
    assert stays[0] == stays[1]


def measured_here() -> list[bool]:
    engine, *_ = zero.initialize(model=make_net(), config=settings_of("auto"))
    found = [unit.placement.updated_on_host for unit in engine._sharded.trained]
    engine.destroy()
    return found


def section(ratio: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": ratio}},
    }


def test_the_key_takes_a_number_or_the_word():
    for given, kept in (("auto", "auto"), (0.5, 0.5), (1, 1.0)):
        assert load(section(given), 1).zero_optimization.offload_optimizer.ratio == kept
    for wrong in ("half", 1.5, -0.1, True, None, math.nan):
        wanted = "zero_optimization.offload_optimizer.ratio: got .*, wanted a number from 0 to 1, or 'auto'"
        with pytest.raises(ConfigError, match=wanted):
            load(section(wrong), 1)


@pytest.mark.parametrize(("free", "stays"), [(1 << 40, True), (1000, False)])
def test_what_fits_into_memory_does_not_go_to_a_drive(monkeypatch, caplog, free, stays):
    monkeypatch.setattr(zero.core.ratio, "measure", lambda *args: ALIKE)
    monkeypatch.setattr(zero.core.ratio, "available_nbytes", lambda ranks: free)
    spec = ParamSpec("u.weight", 1 << 20, "fp32", True, 0, 2)
    plans = [UnitPlan("u", "u", (spec,), make_layout({spec.name: spec.numel}, 1))]
    sharding = Sharding.of_stage(2)
    training = zero.core.ratio.Training(sharding, Formats(), torch.float32, "fp32", "fp32", 1)
    given = OffloadSettings(optimizer=Where.FILE, ratio=None)
    settled = zero.core.ratio.settle_ratio(given, plans, make_mesh(sharding), CPU, training)
    assert settled == given._replace(ratio=0.0 if stays else 1.0)
    assert "a drive counts as 1.0 GB/s" in caplog.text and "(40%) for activations" in caplog.text
    nothing = given._replace(optimizer=Where.DEVICE)
    assert zero.core.ratio.settle_ratio(nothing, plans, make_mesh(sharding), CPU, training).ratio == 1.0


def test_the_log_names_the_reserve():
    choice = choose_ratio([], Sizes(0, 1, Formats(), "fp32"), Where.HOST, Where.DEVICE, ALIKE, 1e9, True)
    text = zero.core.ratio._said(Rates(5e10, 5e10, 3e9, 1e11), 2**30, 2**31, choice)
    assert re.search(r"1,024\.0 MiB for state.*reserve of 2,048\.0 MiB \(40%\) for activations", text)
    assert "copies take 50.0 GB/s down and 50.0 GB/s up" in text
