"""The promise: parameters and views of them that a module returns can be read by its caller, and never crash."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import WIDTH, Block, config
from stages import build, check, inputs
from torch import nn
from torch.nn import functional as F

import zero


@dataclasses.dataclass
class Named:
    """What a library might return."""

    hidden: torch.Tensor
    weight: torch.Tensor


class Giver(nn.Module):
    """A block that returns its weight in some wrapping."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: torch.Tensor) -> Any:
        hidden, weight = self.linear(x), self.linear.weight
        return {
            "tuple": lambda: (hidden, weight),
            "view": lambda: (hidden, weight.t()[1:].t()),
            "detached": lambda: (hidden, weight.detach()),
            "dict": lambda: {"hidden": hidden, "weight": [weight.view(-1)]},
            "dataclass": lambda: Named(hidden, weight),
            "only": lambda: weight,
        }[self.kind]()


class Caller(nn.Module):
    """Uses what an inner module has returned after other modules have run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Giver(kind), Block(), Block()])

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        match self.blocks[0](x):
            case torch.Tensor() as weight:
                hidden = x
            case Named(hidden, weight) | (hidden, weight):
                pass
            case {"hidden": hidden, "weight": [flat]}:
                weight = flat.view(WIDTH, WIDTH)
        x = self.blocks[2](self.blocks[1](hidden))
        return F.linear(x[:, : weight.shape[1]], weight).square().mean()


@pytest.mark.parametrize("kind", ["tuple", "view", "detached", "dict", "dataclass", "only"])
def test_an_inner_module_returns_them(pool, kind):
    check(pool, functools.partial(Caller, kind))


class Root(nn.Module):
    """The root returns parameters: one it has read, one it has not, a view and a detached one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, rank: int) -> dict[str, Any]:
        x = self.blocks[1](self.blocks[0](x))
        first, last = self.blocks[0].up.weight, self.blocks[2].weight
        return {"x": x, "unread": last, "more": (first[:WIDTH, 1:], last.detach().t())}


def with_outputs(model: nn.Module, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """The loss is made outside of the model, from parameters that it returned."""
    given = model(x, rank)
    first, last = given["more"]
    loss = (given["x"] @ given["unread"]).square().mean() + first.square().sum() + (given["x"] @ last).mean()
    (loss * factor).backward()
    return loss.detach()


def two_forwards(model: nn.Module, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """The same, where another forward comes in between."""
    one, two = model(x, rank), model(x + 1, rank)
    loss = (one["x"] @ one["unread"]).square().mean() + (two["x"] @ one["more"][1]).square().mean()
    (loss * factor).backward()
    return loss.detach()


@pytest.mark.parametrize("loop", [with_outputs, two_forwards], ids=lambda loop: loop.__name__)
def test_the_root_returns_them(pool, loop):
    check(pool, Root, loop)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_outputs_stay_valid_and_the_engine_forgets_them(mode):
    """After a forward, after another one, after a backward, and after a step."""
    engine, rank = zero.initialize(model=build(Root), config=config(3, 2))[0], dist.get_rank()
    resting, wanted = engine.state_nbytes().parameters, build(Root)(inputs(0, 0), 0)
    with mode():
        given = engine(inputs(0, rank), rank)
    assert torch.equal(given["unread"], wanted["unread"]) and torch.equal(given["more"][1], wanted["more"][1])
    with torch.no_grad():
        engine(inputs(1, rank), rank)
    assert all(torch.equal(a, b) for a, b in zip(given["more"], wanted["more"], strict=True))
    with_outputs(engine, inputs(0, rank), rank, 1.0)
    assert torch.equal(given["more"][1], wanted["more"][1])
    engine.step()
    assert torch.equal(given["more"][1], wanted["more"][1])
    with pytest.raises(RuntimeError, match=r"^parameter 'blocks.2.weight' is released; read it inside zero.Gathered"):
        given["unread"].sum()
    assert engine.state_nbytes().parameters == resting
    engine.destroy()
