"""The promise: operators that are cut by hand give the numbers of one process, at every stage, and move what is said.

The numbers are integers and powers of two, so that no sum rounds in any order: each missing or double factor shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from operator_models import WHOLE, WIDTH, Products, batch, engine_of
from torch import nn


class Layers(nn.Module):
    """Named by the JSON."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)
        self.norm = nn.Linear(WIDTH, WIDTH, bias=False)
        for param in self.parameters():
            param.data = torch.randint(-2, 3, param.shape).float()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.fc2(self.act(self.fc1(x)))) * y).sum() / 8


def one(make: Callable[[], nn.Module], stage: int, steps: int = 2, **zero_section: Any) -> None:
    """Train steps of two micro-batches, which must be those of one process."""
    ranks, rank, full = dist.get_world_size(), dist.get_rank(), zero_section.get("full_batch", False)
    plain = make()
    optimizer = torch.optim.SGD(plain.parameters(), 0.125)
    engine = engine_of(make(), stage, 2, **zero_section)
    for step in range(steps):
        for number in range(2):
            x, y = batch(2 * step + number)
            (plain(x, y) / ranks / 2).backward()
            own = (x, y) if full else (x.chunk(ranks)[rank], y.chunk(ranks)[rank])
            engine.backward(engine(*own))
            engine.step()
        norm = float(torch.cat([param.grad.flatten() for param in plain.parameters()]).double().norm())
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()
    weights = engine.module_state_dict()
    engine.destroy()
    for name, value in plain.state_dict().items() if rank == 0 else ():
        assert torch.equal(weights[name].cpu(), value), name


PAIRS: dict[str, tuple[Any, Any, Any]] = {
    "rows, columns": ((((4, 1), WHOLE),), ((WHOLE, (1, 4)),), None),
    "contraction, rows": ((((1, 2), (2, 1)),), None, (((4, 1),),)),
    "contraction to rows": ((((1, 4), (4, 1)), (4, 1)), None, (((4, 1),),)),
    "both, both": ((((2, 1), (1, 2)),), (((2, 2), (2, 1)),), None),
    "whole, whole": (((WHOLE, WHOLE),), ((WHOLE, WHOLE),), None),
    "three": ((((2, 2), (2, 1)),), (((1, 4), (4, 1)), WHOLE), (((2, 2),), (1, 2))),
}
SHORT = [("rows, columns", 3), ("contraction, rows", 1), ("three", 2), ("whole, whole", 0)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("pair", "stage"), [*SHORT, *longer(*(each for each in itertools.product(PAIRS, range(4)) if each not in SHORT))]
)
def test_two_products(pair: str, stage: int) -> None:
    first, second, between = PAIRS[pair]
    one(lambda: Products(first, second, between), stage)


LINES = {"fc1": [[1, 1], [4, 1], [4]], "act": [[1, 4]], "fc2": {"in": [[1, 4], [1, 4], [1]], "out": [4, 1]}}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("stage", "full"), [(3, True), *longer(*itertools.product(range(4), (True, False)))])
def test_layers_of_the_json(stage: int, full: bool) -> None:
    one(Layers, stage, 1, shard=LINES, full_batch=full)
