"""The promise: 1,000 steps (200 in the short run) allocate nothing new after the third.

Counted after a collection of garbage: tensors that are alive, the bytes of their storages, and objects of our classes
by class. All three are the same after step 3 and after step 1,000, and the number of all objects that the garbage
collector tracks is so but for a few; with accumulation, forwards without gradients, forwards whose backward never
comes, and exceptions now and then.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from alive import Alive, alive, only_new
from marks import longer
from models import config
from torch import nn

import zero

WIDTH = 4
# What the watch keeps of each other rank, from whenever it first hears of it: by the clock, not by steps.
BY_TIME = ("zero.watchdog.hang_report.Record", "zero.watchdog.hang_report.Seen")


class Tiny(nn.Module):
    """A trained unit and a frozen one, of a few elements each, that a forward uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        for _ in range(2):
            x = self.linear(x).tanh()
        if fails:
            raise ArithmeticError("spoilt")
        return x.square().mean()


def one_step(engine: Any, x: torch.Tensor, step: int) -> None:
    if step % 10 == 0:
        with torch.no_grad():
            engine(x)
        engine(x)  # a loss that nobody wants
    if step % 10 == 2:
        with contextlib.suppress(ArithmeticError):
            engine(x, fails=True)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(x))
        engine.step()


@only_new()
def steady(stage: int, accumulation: int, steps: int) -> tuple[Alive, Alive]:
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(2, WIDTH)
    engine, *_ = zero.initialize(model=Tiny(), config=config(stage, 2, accumulation=accumulation))
    for step in range(3):
        one_step(engine, x, step)
    alive()
    early = alive()  # so that an earlier count is there in this count as it is in the next
    for step in range(3, steps):
        one_step(engine, x, step)
    late = alive()
    engine.destroy()
    return early, late


@pytest.mark.parametrize(
    ("stage", "accumulation", "steps"), [(1, 2, 100), (3, 1, 200), *longer((0, 1, 100), (2, 1, 100), (3, 1, 1000))]
)
def test_nothing_grows(pool, stage, accumulation, steps):
    for early, late in pool.run(2, steady, stage, accumulation, steps):
        assert early.tensors > 0
        assert early.ours
        assert late[:2] == early[:2]
        kinds = {kind: (early.ours.get(kind, 0), late.ours.get(kind, 0)) for kind in {**early.ours, **late.ours}}
        for kind in BY_TIME:
            assert max(kinds.pop(kind, (0, 0))) <= 1, kind
        assert {kind: counts for kind, counts in kinds.items() if counts[0] != counts[1]} == {}
        assert late.objects < early.objects + 20  # dicts of a few numbers are tracked or not, as it happens
