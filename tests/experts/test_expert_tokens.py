"""The promise: as often as the log, monitors get the tokens of each expert of all ranks, and the fullest's share."""

from __future__ import annotations

import csv
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import LENGTH, ROWS, integers, place_of
from expert_models import Experts, json_with
from marks import longer
from ranks import listening

import zero

STEPS, GAS = 5, 2
STILL = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}  # so that routers choose the same in each step
TP = {"tensor_parallel": {"autotp_size": 2}}


class Sink:
    def __init__(self) -> None:
        self.got: dict[tuple[str, int], float] = {}

    def write_events(self, events: Any) -> None:
        self.got |= {(name, at): value for name, value, at in events if name.startswith("Train/Experts/")}


def count(tokens: torch.Tensor, _: Any, args: tuple[torch.Tensor, ...]) -> None:
    tokens += args[1].flatten().bincount(minlength=4)


def counted(places: int, steps: int, only: Any) -> dict[str, float]:
    """The events of so many steps, from one process with the batches of all places."""
    model, found = Experts(only=only), dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if name.endswith("experts"):
            found[name] = torch.zeros(4, dtype=torch.long)
            module.register_forward_pre_hook(functools.partial(count, found[name]))
    for place in range(places):
        for micro in range(GAS):
            model(**integers(micro, place))
    events = {}
    for name, each in found.items():
        assert each.sum() == places * GAS * 2 * ROWS * LENGTH
        events[f"Train/Experts/{name}/fullest"] = each.max().item() / each.sum().item()
        events |= {f"Train/Experts/{name}/tokens_{at}": steps * count for at, count in enumerate(each.tolist())}
    return events


def run(settings: dict[str, Any], only: Any, place: int, evaluates: bool = False) -> tuple[Sink, list[int], list[str]]:
    """What the monitors got, in which steps ranks told each other, and the lines of the log."""
    sink, told = Sink(), []
    with listening(20) as lines:
        engine, *_ = zero.initialize(model=Experts(only=only), config=settings)
        engine.monitor.add(sink)
        watchdog = engine._sharded.world.watchdog
        begin = watchdog.begin

        def noting(what: str, *args: Any, **kwargs: Any) -> Any:
            told.extend([engine.global_steps + 1] * (what == "tokens of experts"))
            return begin(what, *args, **kwargs)

        watchdog.begin = noting
        for _ in range(STEPS):
            for micro in range(GAS):
                engine.backward(engine(**integers(micro, place)))
                engine.step()
            if evaluates:
                engine.eval()
                engine(**integers(0, place))
                engine.train()
        engine.destroy()
    return sink, told, [line for line in lines if line.startswith("step ")]


CASES = [
    (2, 2, 3, None, {}),
    (4, 4, 1, (2,), TP),
    *longer((2, 2, 0, (2,), {}), (4, 2, 2, None, {}), (4, 2, 3, None, TP), (4, 4, 0, (0, 3), {})),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "ep", "stage", "only", "more"), CASES)
def test_tokens_are_those_of_one_process(world: int, ep: int, stage: int, only: Any, more: dict[str, Any]) -> None:
    """Not those of an evaluation."""
    tp = 2 if more else 1
    sink, told, lines = run(json_with(ep, stage, GAS, steps_per_print=2, **STILL, **more), only, place_of(tp), True)
    assert told == [2, 4]
    if dist.get_rank():
        assert not sink.got and not lines
        return
    places = world // tp
    events = counted(places, 2, only)
    samples = [step * places * ROWS * GAS for step in (2, 4)]
    assert sink.got == {(name, at): value for at in samples for name, value in events.items()}
    fullest = max(value for name, value in events.items() if name.endswith("/fullest"))
    assert len(lines) == 2 and all(line.endswith(f" | fullest_expert={round(fullest, 3):.5g}") for line in lines)


@pytest.mark.ranks(2)
def test_without_a_log_monitors_have_them_at_each_tenth_step_and_nobody_else_asks(tmp_path: Path) -> None:
    quiet = {"steps_per_print": math.inf, **STILL}
    assert run(json_with(2, 3, GAS, **quiet), None, 0)[1] == []
    folder = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    folder |= {"zero": {"report": str(tmp_path / "run")}}
    engine, *_ = zero.initialize(model=Experts(only=(2,)), config=json_with(2, 1, **quiet, **folder))
    for _ in range(10):
        engine.backward(engine(**integers(0, 0)))
        engine.step()
    engine.destroy()
    if dist.get_rank():
        return
    with (tmp_path / "job" / "Train_Experts_blocks.1.mix.experts_tokens_2.csv").open() as file:
        tokens = 10 * 2 * 2 * ROWS * LENGTH  # steps, ranks, experts of each
        assert [*csv.reader(file)] == [["step", "tokens_2"], [str(10 * 2 * ROWS), str(tokens)]]
    lines = map(json.loads, (tmp_path / "run" / "rank-0.jsonl").read_text().splitlines())
    (line,) = (line for line in lines if line["event"] == "experts")
    assert line["step"] == 10 and line["tokens"] == {f"blocks.{at}.mix.experts": [0, 0, tokens, 0] for at in range(2)}
    assert len([*(tmp_path / "job").glob("Train_Experts_*")]) == 2 * (1 + 4)
