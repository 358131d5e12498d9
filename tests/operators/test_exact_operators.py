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
from torch import nn

import zero
from zero.parallel.operators.placed import Moved

ROWS, WIDTH = 8, 16
WHOLE = (1, 1)


class Products(nn.Module):
    """Z = (X W) V, of which each product may have a strategy."""

    def __init__(self, first: Any = None, second: Any = None, between: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = (nn.Parameter(torch.randint(-3, 4, (WIDTH, WIDTH)).float()) for _ in range(2))
        self.one = self.two = torch.matmul
        self.between = None
        if first is not None:
            self.one = zero.shard(torch.matmul, *first)
        if second is not None:
            self.two = zero.shard(torch.matmul, *second)
        if between is not None:
            self.between = zero.shard(torch.relu, *between)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.one(x, self.w)
        h = h if self.between is None else self.between(h)
        return (self.two(h, self.v) * y).sum() / 8


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


def batch(number: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all ranks."""
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(-2, 3, (ROWS, WIDTH), generator=generator).float() for _ in range(2))


def json_with(stage: int, **zero_section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.125}},
        "zero_optimization": {"stage": stage},
        "zero": zero_section,
    }


def one(make: Callable[[], nn.Module], stage: int, steps: int = 2, **zero_section: Any) -> Any:
    """Train steps of two micro-batches, which must be those of one process; what was moved in the last."""
    ranks, rank, full = dist.get_world_size(), dist.get_rank(), zero_section.get("full_batch", False)
    plain = make()
    optimizer = torch.optim.SGD(plain.parameters(), 0.125)
    engine, *_ = zero.initialize(model=make(), config=json_with(stage, **zero_section))
    counts = engine._training.forms.operators.mesh.counts
    for step in range(steps):
        for number in range(2):
            x, y = batch(2 * step + number, ranks)
            (plain(x, y) / ranks / 2).backward()
            own = (x, y) if full else (x.chunk(ranks)[rank], y.chunk(ranks)[rank])
            counts.clear()
            engine.backward(engine(*own))
            engine.step()
        norm = float(torch.cat([param.grad.flatten() for param in plain.parameters()]).double().norm())
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()
    weights = engine.module_state_dict()
    found = dict(counts)
    engine.destroy()
    for name, value in plain.state_dict().items() if rank == 0 else ():
        assert torch.equal(weights[name].cpu(), value), name
    return found


PAIRS: dict[str, tuple[Any, Any, Any, dict[Moved, int]]] = {
    "rows, columns": ((((4, 1), WHOLE),), ((WHOLE, (1, 4)),), None, {}),
    "contraction, rows": ((((1, 2), (2, 1)),), None, (((4, 1),),), {}),
    "contraction to rows": ((((1, 4), (4, 1)), (4, 1)), None, (((4, 1),),), {}),
    "both, both": ((((2, 1), (1, 2)),), (((2, 2), (2, 1)),), None, {}),
    "whole, whole": (((WHOLE, WHOLE),), ((WHOLE, WHOLE),), None, {}),
    "three": ((((2, 2), (2, 1)),), (((1, 4), (4, 1)), WHOLE), (((2, 2),), (1, 2)), {}),
}
SHORT = [("rows, columns", 3), ("contraction, rows", 1), ("three", 2), ("whole, whole", 0)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("pair", "stage"), [*SHORT, *longer(*(each for each in itertools.product(PAIRS, range(4)) if each not in SHORT))]
)
def test_two_products(pair: str, stage: int) -> None:
    first, second, between, _ = PAIRS[pair]
    one(lambda: Products(first, second, between), stage)


LINES = {"fc1": [[1, 1], [4, 1], [4]], "act": [[1, 4]], "fc2": {"in": [[1, 4], [1, 4], [1]], "out": [4, 1]}}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("stage", "full"), [(3, True), *longer(*itertools.product(range(4), (True, False)))])
def test_layers_of_the_json(stage: int, full: bool) -> None:
    one(Layers, stage, 1, shard=LINES, full_batch=full)
