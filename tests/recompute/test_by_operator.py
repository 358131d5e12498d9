"""The promise: what is recomputed may be said of operators by name, and of modules in the program; no bit changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recomputing import all_same, result, settings
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import zero

WIDTH = 6


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(F.dropout(self.layer(x), 0.5)).view(-1, WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(WIDTH, WIDTH), Inner(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(torch.tanh(self.inner(F.gelu(self.up(x)))), 0.5))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Counted(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def train(section: dict[str, Any], mark: Callable[[Net], Any] = lambda _: None) -> tuple[dict[str, Any], Counter[str]]:
    """Two steps; what they end with, and the operators of the last backward."""
    torch.manual_seed(5)
    model = Net()
    mark(model)
    engine = zero.initialize(model=model, config=settings(3, section))[0]
    torch.manual_seed(3)
    losses = []
    for _ in range(2):
        loss = engine(torch.randn(4, WIDTH))
        with Counted() as counted:
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return result(engine, losses), counted.ran


def blocks_but(*inner: int) -> Callable[[Net], None]:
    """Say of all blocks that they are recomputed, and of what is inside of some that it is not."""

    def mark(model: Net) -> None:
        for number, block in enumerate(model.blocks):
            assert block.recompute() is block
            if number in inner:
                block.inner.recompute(False)

    return mark


PRODUCTS = 2 * 3 * 3  # of a backward, each with two


@pytest.mark.ranks(2)
def test_what_runs_again_is_what_was_named() -> None:
    modules = {"modules": ["Block"]}
    (plain, never), (full, again) = train({}), train(modules)
    (some, gelu), (marked, by_hand) = train(modules | {"ops": ["gelu"]}), train({}, blocks_but())
    (kept, sines), (named, tanh) = (
        train({}, blocks_but(0, 2)),
        train(modules | {"ops": ["aten.tanh", "aten.sin.default"]}),
    )
    all_same([plain, full, some, marked, kept, named])
    assert (never["gelu"], never["sin"], never["addmm"]) == (0, 0, 0)
    assert (
        (again["gelu"], again["sin"], again["addmm"])
        == (by_hand["gelu"], by_hand["sin"], by_hand["addmm"])
        == (3, 3, 6)
    )
    assert (gelu["gelu"], gelu["sin"], gelu["addmm"], gelu["tanh"]) == (3, 0, 0, 0)
    assert (sines["gelu"], sines["sin"], sines["addmm"]) == (3, 1, 4)
    assert (tanh["gelu"], tanh["sin"], tanh["tanh"], tanh["addmm"]) == (0, 3, 3, 0)


@pytest.mark.ranks(2)
def test_the_mark_of_a_program_counts_more_than_the_json() -> None:
    def mark(model: Net) -> None:
        model.blocks[1].recompute(False)

    (plain, _), (marked, ran) = train({}), train({"modules": ["Block"]}, mark)
    all_same([plain, marked])
    assert ran["gelu"] == 2


@pytest.mark.ranks(2)
def test_names_of_nothing() -> None:
    with pytest.raises(ValueError, match=r"zero.recompute.ops: \['gelo'\] are no operators of torch"):
        train({"modules": ["Block"], "ops": ["gelo", "aten.mm"]})
    with pytest.raises(ValueError, match=r"zero.recompute.modules: is missing; name classes or paths"):
        train({"policy": "selective"})
