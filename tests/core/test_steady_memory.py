"""The promise: no step grows in 1,000 (100 in the short run).

Tensors that are alive, the bytes of their storages, and objects of our classes by class are the same after step 3 and
after the last; with accumulation, forwards without gradients or backward, and exceptions now and then. That steps take
memory of the same sizes from the third on is seen in what test_stream_order.py records; here a GPU says so itself.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from alive import Alive, alive, only_new
from marks import longer
from models import config, make_net
from recorded_steps import CUT, QUICK, Case
from scenario import Model, run
from torch import nn

import zero

WIDTH = 4
# What the watch keeps of each other rank, from whenever it first hears of it: by the clock, not by steps.
BY_TIME = tuple(f"zero.watchdog.hang_report.{name}" for name in ("Record", "Seen", "Blocked"))


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
    ("stage", "accumulation", "steps"), [(3, 2, 100), *longer((0, 1, 100), (2, 1, 100), (3, 1, 1000))]
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


def device_requests(engine: Any, number: int) -> int:
    """Until now, of torch's own allocator."""
    torch.cuda.synchronize()  # so that memory which other streams have used is handed on in the next step
    return torch.cuda.memory_stats()["num_device_alloc"]


@pytest.mark.gpu
@pytest.mark.ranks(1)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
@pytest.mark.parametrize("case", [*(Case(1, stage, CUT if stage == 3 else {}) for stage in range(4)), *QUICK[-3:-1]])
def test_a_gpus_own_allocator_asks_for_nothing_either(case):
    model = Model(lambda: make_net(width=1024))
    counts = run(model, {"stage": case.stage, "section": case.section or {}}, 6, watch=device_requests).seen
    assert counts[-1] == counts[3] > 0
