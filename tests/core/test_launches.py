"""The promise: from backward to the end of a step the engine launches as much for a unit of many parameters as few."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import longer
from scenario import settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero

PRODUCT = str(Path(zero.__file__).parent)
BF16 = {"precision": "bf16"}
WORLD, STEPS = 2, 3


class Launches(TorchDispatchMode):
    """Inside, counts what the product launches, by operator; not what autograd computes for the model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty")) and by_product():
            self.calls[name] += 1
            if name == "_foreach_add_":
                dtypes = {each.dtype for each in tree_leaves(args)}
                assert len(dtypes) == 1 or len(args[0]) == 1, "on a GPU these would be added one by one"
        return func(*args, **kwargs or {})


def by_product() -> bool:
    """Whether it is the product that asks, not autograd, maybe in its own thread."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_filename.startswith(PRODUCT):
            return True
        frame = frame.f_back
    return False


class Biased(nn.Module):
    """A unit of a matrix and so many vectors."""

    def __init__(self, vectors: int) -> None:
        super().__init__()
        self.matrix = nn.Linear(24, 24)
        self.vectors = nn.ParameterList(torch.full((24,), 0.1) for _ in range(vectors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.matrix(x) + sum(self.vectors))


def count(vectors: int, json: dict[str, Any]) -> Counter[str]:
    """What is launched in the backwards of the last step, and in it."""
    torch.manual_seed(1)
    engine, *_ = zero.initialize(model=nn.Sequential(*(Biased(vectors) for _ in range(3))), config=json)
    dtype = next(engine.module.parameters()).dtype
    for _ in range(STEPS):
        launches = Launches()
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(torch.randn(2, 24, dtype=dtype)).float().square().mean()
            with launches:
                engine.backward(loss)
                engine.step()
    engine.destroy()
    return launches.calls


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize(
    ("stage", "accumulation", "more"),
    [(0, 3, BF16), (3, 1, {}), *longer(*((s, a, more) for s in range(4) for a in (1, 3) for more in ({}, BF16)))],
)
def test_launches_do_not_grow_with_the_parameters_of_a_unit(stage, accumulation, more):
    json = settings(stage, WORLD, accumulation=accumulation, cut=stage == 3, gradient_clipping=1.0, **more)
    few, many = count(1, json), count(9, json)
    assert few == many and few.total() > 3
