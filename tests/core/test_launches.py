"""The promise: from backward to the end of a step the engine launches as much for a unit of many parameters as of few.

Small gradients of a unit are moved to its flat buffer at once, and the bits are those of moving them one by one.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import longer
from models import config, equal, make_net, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero
from zero.core import gradients
from zero.kernels import native

PRODUCT = str(Path(zero.__file__).parent)
BF16 = {"bf16": {"enabled": True}}
WORLD, STEPS = 2, 3


class Launches(TorchDispatchMode):
    """Inside, counts what the product launches, by function and operator; not what autograd computes for the model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, by = func.overloadpacket.__name__, site()
        if by and not func.is_view and not name.startswith(("empty", "new_empty")):
            self.calls[f"{by}: {name}"] += 1
            if name == "_foreach_add_":
                dtypes = {each.dtype for each in tree_leaves(args)}
                assert len(dtypes) == 1 or len(args[0]) == 1, "on a GPU these would be added one by one"
        return func(*args, **kwargs or {})


def site() -> str:
    """The innermost function of the product that asks; "" where it is autograd that does, maybe in its own thread."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_filename.startswith(PRODUCT):
            return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


class Biased(nn.Module):
    """A unit of a matrix and so many vectors."""

    def __init__(self, vectors: int) -> None:
        super().__init__()
        self.matrix = nn.Linear(24, 24)
        self.vectors = nn.ParameterList(torch.full((24,), 0.1) for _ in range(vectors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.matrix(x) + sum(self.vectors))


def count(vectors: int, settings: dict[str, Any]) -> tuple[Counter[str], int]:
    """What is launched in the backwards of the last step, and in it; and the units."""
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_find", lambda name: (None, None))  # what kernels do is seen in their references
        native.load.cache_clear()
        engine, *_ = zero.initialize(model=nn.Sequential(*(Biased(vectors) for _ in range(3))), config=settings)
        dtype = next(engine.module.parameters()).dtype
        for _ in range(STEPS):
            launches = Launches()
            for _ in range(settings["gradient_accumulation_steps"]):
                loss = engine(torch.randn(2, 24, dtype=dtype)).float().square().mean()
                with launches:
                    engine.backward(loss)
                    engine.step()
        units = len(engine._sharded.units)
        engine.destroy()
    native.load.cache_clear()
    return launches.calls, units


@pytest.mark.parametrize(
    ("stage", "accumulation", "more"),
    [(0, 3, BF16), (3, 1, {}), *longer(*((s, a, more) for s in range(4) for a in (1, 3) for more in ({}, BF16)))],
)
def test_launches_do_not_grow_with_the_parameters_of_a_unit(pool, stage, accumulation, more):
    settings = config(stage, WORLD, accumulation=accumulation) | {"gradient_clipping": 1.0} | more
    settings["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
    (few, units), (many, _) = (pool.run(WORLD, count, vectors, settings)[0] for vectors in (1, 9))
    assert few == many
    moved = few["gradients._move: _foreach_copy_"] + few["gradients._move: _foreach_add_"]
    assert moved == units * accumulation


def trained(settings: dict[str, Any], together: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "TOGETHER", together)
        return train(make_net(), WORLD, settings, steps=3)


@pytest.mark.parametrize(
    ("stage", "accumulation", "more"), [(0, 2, BF16), *longer((1, 2, {}), (2, 2, BF16), (3, 2, {}))]
)
def test_the_bits_are_those_of_gradients_that_are_moved_one_by_one(pool, stage, accumulation, more):
    settings = config(stage, WORLD, accumulation=accumulation) | more
    one_by_one, some, whole_units = (pool.run(WORLD, trained, settings, size)[0] for size in (0, 500, 1 << 20))
    assert equal(whole_units, one_by_one)
    assert equal(some, one_by_one)
