"""The promise: rates of devices are what data sheets say, less what is lost, and this machine's own can be measured."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from test_import import fresh

from zero.sizes.rates import DEVICES, REACHED, measured


def test_given_devices_have_every_rate_and_no_more_than_their_data_sheets_say() -> None:
    assert {"h200", "h100", "a100"} <= DEVICES.keys()
    for name, rates in DEVICES.items():
        values = asdict(rates)
        assert (values.pop("name"), min(values.pop("flops").values()) > 0) == (name, True)
        assert all(value > 0 for value in values.values())
        assert rates.flops["fp16"] > rates.flops["fp32"]
    h100 = DEVICES["h100"]
    assert h100.flops["bf16"] == pytest.approx(989e12 * REACHED["flops"])
    assert h100.device_bandwidth == pytest.approx(3.35e12 * REACHED["bandwidth"])
    assert h100.intra_host == pytest.approx(450e9 * REACHED["links"])


def test_given_rates_need_no_torch() -> None:
    code = "import json; from zero.sizes.rates import DEVICES; print(json.dumps(list(DEVICES)))"
    assert "h200" in fresh(code, ("torch", "numpy", "zero._cpu", "zero._cuda"))


@pytest.mark.long
def test_this_machine_is_measured_on_ranks_at_the_same_time(tmp_path) -> None:
    rates = measured(2, "bf16", 64, str(tmp_path))
    assert rates.flops.keys() == {"fp32", "bf16"} and min(rates.flops.values()) > 1e6
    moved = rates.device_bandwidth, rates.host_bandwidth, rates.host_link, rates.drive_read, rates.drive_write
    assert min(moved) > 1e6 and rates.intra_host > 1e6 and 1e-6 < rates.latency < 10
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_ranks_that_cannot_measure_say_why() -> None:
    with pytest.raises(RuntimeError, match=r"2 rank\(s\):\n(.|\n)*KeyError: 'fp7'"):
        measured(2, "fp7", 64)
