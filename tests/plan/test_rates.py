"""The promise: rates of devices are what data sheets say, less what is lost, and this machine's own can be measured:
of the model itself where it fits and runs, on a CPU with messages beside computing ranks."""

from __future__ import annotations

import textwrap
import time
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_import import fresh
from torch import nn

from zero.config import load
from zero.sizes import command, rank_rates, source
from zero.sizes.rates import DEVICES, REACHED, Rates, measured, together
from zero.sizes.source import load_model

CPU = torch.device("cpu")
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


def test_given_rates_need_no_torch() -> None:
    code = "import json; from zero.sizes.rates import DEVICES; print(json.dumps(list(DEVICES)))"
    assert "h200" in fresh(code, ("torch", "numpy", "zero._cpu", "zero._cuda"))


def test_figures_of_several_ranks_are_their_medians() -> None:
    own = asdict(H100)
    own.pop("name")
    seen = [{**own, "flops": {"fp32": flops}, "latency": late} for flops, late in ((7.0, 1.0), (3.0, 5.0), (2.0, 9.0))]
    assert together(seen) == replace(H100, name="measured", flops={"fp32": 3.0}, latency=5.0)


def test_flops_are_those_of_the_model_itself_in_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    class Slow(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            seen.add((values.dtype, self.weight.dtype))
            time.sleep(0.05)
            return super().forward(values)

    monkeypatch.setattr(rank_rates, "_SECONDS", 0.01)
    found = rank_rates.flops_of("bf16", 512, CPU, lambda: (Slow(8, 8), {"values": torch.ones(4, 8)}))
    assert seen == {(torch.bfloat16, torch.bfloat16)} and 0 < found <= SLOW_FLOPS


def test_recomputation_is_what_a_pass_takes_longer_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Counted(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            calls.append(self)
            return super().forward(values).relu()

    def counted(turn: Any, device: torch.device, rounds: int) -> int:
        calls.clear()
        turn()
        return len(calls)

    monkeypatch.setattr(rank_rates, "_median", counted)
    blocks = [Counted(8, 8) for _ in range(3)]
    found = rank_rates.recomputing("fp32", 512, CPU, lambda: (nn.Sequential(*blocks), (torch.ones(2, 8),)))
    assert found == {"none": 0.0, "selective": 1.0, "full": 1.0}, "each forward runs twice"


def test_a_model_without_blocks_is_not_run_for_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_rates, "_median", lambda *_: pytest.fail("there is nothing to recompute"))
    assert rank_rates.recomputing("fp32", 512, CPU, lambda: (nn.Linear(8, 8), (torch.ones(2, 8),))) == {}


@pytest.mark.parametrize(("alone", "latency"), [(0.1, 0.8), (1.1, 1.1)])
def test_a_message_costs_what_computing_takes_longer_beside_it(
    alone: float, latency: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beside what computes: of nothing, next to nothing, many bytes; then of next to nothing while nobody computes.
    seconds = iter([1.0, 1.8, 3.4, alone, 2.0, 2.8, 4.4, alone, 1.5, 9.0, 12.0, 0.9 * alone])
    monkeypatch.setattr(rank_rates, "_ROUNDS", 3)
    monkeypatch.setattr(rank_rates, "_median", lambda turn, device, rounds: next(seconds))
    found = rank_rates._links(SimpleNamespace(size=2), CPU)
    assert found["latency"] == pytest.approx(latency / rank_rates._MESSAGES)
    assert found["intra_host"] == found["inter_host"] == pytest.approx(rank_rates._LARGE * rank_rates._MESSAGES / 1.6)


def test_messages_are_gathers_and_reductions_beside_a_rank_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def begun(values: torch.Tensor, axis: Any, tag: int) -> Any:
        seen.append((tag, values.nbytes))
        return SimpleNamespace(wait=lambda: seen.append("end"), sum=lambda out, accumulate: seen.append("end"))

    class Block(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            seen.append("compute")
            return super().forward(values)

    monkeypatch.setattr(rank_rates.comm, "gather", begun)
    monkeypatch.setattr(rank_rates.comm, "scatter", begun)
    monkeypatch.setattr(rank_rates, "_blocks", lambda *sizes: (Block(2, 2), (torch.ones(1, 2),)))
    monkeypatch.setattr(rank_rates, "_median", lambda turn, device, rounds: turn() or 1.0)
    monkeypatch.setattr(rank_rates, "_ROUNDS", 1)
    rank_rates._links(SimpleNamespace(size=2), CPU)
    half = rank_rates._MESSAGES // 2
    wanted = 2 * half * ["compute"]
    for nbytes in (2 * rank_rates._SMALL, 2 * rank_rates._LARGE):
        wanted += half * [(0, nbytes), "compute", "end", (1, nbytes), "compute", "end"]
    wanted += half * [(0, 2 * rank_rates._SMALL), "end", (1, 2 * rank_rates._SMALL), "end"]
    assert seen == wanted


def rates_of(monkeypatch: pytest.MonkeyPatch, free: int, runs: bool, inputs: Any) -> tuple[dict[str, Any], str]:
    """What is asked of `measured` at last, and the note, for a model of 72 parameters."""
    asked: dict[str, Any] = {}

    def measures(ranks: int, dtype: str, **kwargs: Any) -> Rates:
        asked.clear()
        asked.update(kwargs, ranks=ranks, dtype=dtype)
        if kwargs and not runs:
            raise RuntimeError("on 2 ranks:\nno values on meta")
        return H100

    monkeypatch.setattr(command, "measured", measures)
    monkeypatch.setattr(command, "available_nbytes", lambda ranks: free)
    monkeypatch.setattr(source, "load_model", lambda text, sequence: (nn.Linear(8, 8, device="meta"), inputs))
    model, params = (None, 1e9) if inputs is None else ("a:b", None)
    given = Namespace(model=model, params=params, layers=None, width=None, sequence=None, device="measured")
    rates, note = command.Source(given).rates(load({"train_batch_size": 2, "torch_autocast": {"enabled": True}}, 2))
    assert rates is H100
    return asked, note


def test_the_model_is_run_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = (torch.ones(4, 8),)
    blocks = {"ranks": 2, "dtype": "bf16"}
    asked, note = rates_of(monkeypatch, 10**6, True, inputs)
    assert asked == {**blocks, "model": "a:b", "sequence": 4096} and "of the model itself" in note
    asked, note = rates_of(monkeypatch, 600, True, inputs)
    assert asked == blocks and "transformer blocks: the model would take 0.0 GB of each rank" in note
    asked, note = rates_of(monkeypatch, 10**6, False, inputs)
    assert asked == blocks and note.endswith("transformer blocks: running the model failed: no values on meta.")
    asked, note = rates_of(monkeypatch, 10**6, True, None)
    assert asked == blocks and note.endswith("there is no model to run.")


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / f"{tmp_path.name}.py").write_text(textwrap.dedent(SLOW))
    monkeypatch.chdir(tmp_path)
    return f"{tmp_path.name}:make"


def test_a_model_can_be_loaded_with_values(slow: str) -> None:
    model, (inputs,) = load_model(slow, 1, CPU)
    assert not model.weight.is_meta and model.weight.abs().sum() > 0 and inputs.sum() == 32


@pytest.mark.long
def test_this_machine_is_measured_on_ranks_at_the_same_time() -> None:
    rates = measured(2, "bf16", 64)
    assert rates.flops.keys() == {"fp32", "bf16"} and min(rates.flops.values()) > 1e6
    moved = rates.device_bandwidth, rates.host_bandwidth, rates.host_link
    assert min(moved) > 1e6 and rates.intra_host > 1e6 and 0 < rates.latency < 10


@pytest.mark.long
def test_a_model_is_measured_on_ranks_of_its_own(slow: str) -> None:
    assert 0 < measured(2, "bf16", model=slow).flops["bf16"] <= SLOW_FLOPS


@pytest.mark.long
def test_ranks_that_cannot_measure_say_why() -> None:
    with pytest.raises(RuntimeError, match=r"2 ranks:\n(.|\n)*KeyError: 'fp7'"):
        measured(2, "fp7", 64)
