"""The promise: rates of devices are what data sheets say, less what is lost, and this machine's own can be measured:
of the model itself where it fits and runs, on a CPU with messages beside computing ranks."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path

import pytest

from zero.sizes.rates import DEVICES, REACHED
from zero.tools.plan.rank_rates import measured

H100 = DEVICES["h100"]
SLOW = """
    import time, torch

    class Slow(torch.nn.Linear):
        def forward(self, values):
            time.sleep(0.05)
            return super().forward(values)

    def make():
        return Slow(8, 8), torch.ones(4, 8)
"""
SLOW_FLOPS = 2 * 2 * 4 * 8 * 8 / 0.05  # at most: a forward, and the product for the gradient of the weight


def test_given_devices_have_every_rate_and_no_more_than_their_data_sheets_say() -> None:
    assert {"h200", "h100", "a100"} <= DEVICES.keys()
    for name, rates in DEVICES.items():
        values = asdict(rates)
        assert (values.pop("name"), min(values.pop("flops").values()) > 0) == (name, True)
        assert values.pop("recompute") == {} and all(value > 0 for value in values.values())
        assert rates.flops["fp16"] > rates.flops["fp32"]
    assert H100.flops["bf16"] == pytest.approx(989e12 * REACHED["flops"])
    assert H100.device_bandwidth == pytest.approx(3.35e12 * REACHED["bandwidth"])
    assert H100.intra_host == pytest.approx(450e9 * REACHED["links"])


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / f"{tmp_path.name}.py").write_text(textwrap.dedent(SLOW))
    monkeypatch.chdir(tmp_path)
    return f"{tmp_path.name}:make"


@pytest.mark.long
def test_this_machine_is_measured_on_ranks_at_the_same_time() -> None:
    rates = measured(2, "bf16", 64)
    assert rates.flops.keys() == {"fp32", "bf16"} and min(rates.flops.values()) > 1e6
    assert rates.recompute["bf16"].keys() == {"none", "selective", "full"}
    moved = rates.device_bandwidth, rates.host_bandwidth, rates.host_link
    assert min(moved) > 1e6 and rates.intra_host > 1e6 and 0 < rates.latency < 10


@pytest.mark.long
def test_a_model_is_measured_on_ranks_of_its_own(slow: str) -> None:
    assert 0 < measured(2, "bf16", model=slow).flops["bf16"] <= SLOW_FLOPS


@pytest.mark.long
def test_ranks_that_cannot_measure_say_why() -> None:
    with pytest.raises(RuntimeError, match=r"2 ranks:\n(.|\n)*KeyError: 'fp7'"):
        measured(2, "fp7", 64)
