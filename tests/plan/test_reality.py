"""The promise: after the third step the engine says once, on rank 0, where memory differs from what was planned."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import Net, config, share
from test_log import said

import zero

SHAPE = {"blocks": 6, "width": 48}
BF16 = {"bf16": {"enabled": True}}
ON = {"zero": {"plan": True}}
CPU = {"device": "cpu"}


class Hoarder(Net):
    """Makes itself a tensor in its third call, and keeps it."""

    calls = 0

    def forward(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            self.kept = torch.zeros(1 << 16)
        return super().forward(*args)


def lines_of(settings: dict[str, Any], model: Any = None, optimizer: Any = None, steps: int = 5) -> list[str]:
    """What is said of the plan in so many steps."""

    def run() -> None:
        made = model or Net(**SHAPE)
        own = None if optimizer is None else optimizer(made.parameters())
        engine, *_ = zero.initialize(model=made, config=settings, optimizer=own)
        for number in range(steps * settings["gradient_accumulation_steps"]):
            engine.backward(engine(*share(number)))
            engine.step()
        engine.destroy()

    return [line for line in said(run) if "plan" in line]


def settings_of(
    stage: int, accumulation: int = 1, section: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    found = config(stage, 2, accumulation=accumulation, **(ON | more))
    found["zero_optimization"] |= section or {}
    return found


CASES = [
    (3, 1, {}, BF16),
    *longer(
        (0, 1, {}, {}),
        (0, 2, {}, BF16),
        (1, 2, {}, {}),
        (2, 2, {}, BF16),
        (2, 1, {"offload_optimizer": CPU}, {}),
        *((stage, 1, {}, {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}) for stage in (0, 3)),
        (3, 1, {"offload_optimizer": CPU, "offload_param": CPU}, {}),
        (3, 2, {}, {"zero": {"plan": True, "recompute": {"modules": ["Block"]}}}),
    ),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "accumulation", "section", "more"), CASES)
def test_what_comes_true_is_said_in_one_line(stage, accumulation, section, more):
    lines = lines_of(settings_of(stage, accumulation, section, **more))
    if dist.get_rank():
        assert not lines
        return
    assert len(lines) == 1
    kinds = re.match(r"plan and reality of step 3 \(MB on rank 0\): (.*); each is within 5 % of the plan", lines[0])
    assert kinds, lines
    assert {"reduction", "activations"} <= set(re.findall(r"[a-z]+(?= [0-9])", kinds[1]))


@pytest.mark.ranks(2)
def test_what_differs_is_named_with_a_reason():
    sgd = lambda params: torch.optim.SGD(params, lr=1e-3)  # noqa: E731
    settings = settings_of(1)
    del settings["optimizer"]
    lines = lines_of(settings, Hoarder(**SHAPE), sgd)
    if dist.get_rank():
        assert not lines
        return
    (text,) = lines
    head, *differ = text.splitlines()
    assert head.endswith("More than 5 % off the plan:")
    kinds = {line.split(":")[0].strip(): line for line in differ}
    assert kinds.keys() == {"moments", "activations"}
    assert re.search(
        r"0\.0 MB, planned were \S+ \(-100%\); perhaps the optimizer is one of torch's own", kinds["moments"]
    )
    assert "perhaps the model keeps tensors itself" in kinds["activations"]
