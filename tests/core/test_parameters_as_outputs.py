"""The promise: parameters and views of them that a module returns can be read by its caller, and never crash."""

from __future__ import annotations

import dataclasses
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

    def __init__(self, kind: str = "tuple") -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        x, weight = self.linear(x), self.linear.weight
        return {
            "tuple": lambda: (x, weight),
            "view": lambda: (x, weight.t()[1:].t()),
            "detached": lambda: (x, weight.detach()),
            "dict": lambda: {"hidden": x, "weight": [weight.view(-1)]},
            "dataclass": lambda: Named(x, weight),
            "only": lambda: weight,
        }[self.kind]()


class Caller(nn.Module):
    """Uses what inner modules have returned after other modules have run."""

    kind = "tuple"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Giver(self.kind), Block(), Block()])

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        given = self.blocks[0](x)
        if isinstance(given, torch.Tensor):
            given = (x, given)
        if isinstance(given, Named):
            given = (given.hidden, given.weight)
        hidden, weight = (given["hidden"], given["weight"][0].view(WIDTH, WIDTH)) if isinstance(given, dict) else given
        x = self.blocks[2](self.blocks[1](hidden))
        return F.linear(x[:, : weight.shape[1]], weight).square().mean()


class View(Caller):
    kind = "view"


class Detached(Caller):
    kind = "detached"


class Dict(Caller):
    kind = "dict"


class DataClass(Caller):
    kind = "dataclass"


class Only(Caller):
    kind = "only"


@pytest.mark.parametrize("kind", [Caller, View, Detached, Dict, DataClass, Only], ids=lambda kind: kind.__name__)
def test_an_inner_module_returns_them(pool, kind):
    check(pool, kind)


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


def kept(mode: str) -> dict[str, Any]:
    """What outputs say after a forward, after another one, after a backward and a step."""
    engine, rank, found = zero.initialize(model=build(Root), config=config(3, 2))[0], dist.get_rank(), {}
    plain = build(Root)
    wanted = plain(inputs(0, 0), 0)
    no_graph = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[mode]
    with no_graph():
        given = engine(inputs(0, rank), rank)
    found["at once"] = torch.equal(given["unread"], wanted["unread"]) and torch.equal(
        given["more"][1], wanted["more"][1]
    )
    with torch.no_grad():
        engine(inputs(1, rank), rank)
    found["after the next"] = all(torch.equal(a, b) for a, b in zip(given["more"], wanted["more"], strict=True))
    with_outputs(engine, inputs(0, rank), rank, 1.0)
    found["after a backward"] = torch.equal(given["more"][1], wanted["more"][1])
    engine.step()
    found["after a step"] = torch.equal(given["more"][1], wanted["more"][1])
    try:
        given["unread"].sum()
        found["the parameter itself"] = "nothing"
    except RuntimeError as error:
        found["the parameter itself"] = str(error)
    found["at rest"] = engine.state_nbytes().parameters * 2 == sum(
        u.plan.layout.numel * 4 for u in engine._sharded.units
    )
    engine.destroy()
    return found


@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad"])
def test_outputs_stay_valid_and_the_engine_forgets_them(pool, mode):
    for found in pool.run(2, kept, mode):
        said = found.pop("the parameter itself")
        assert said.startswith("parameter 'blocks.2.weight' is released; read it inside zero.GatheredParameters(...)")
        assert all(found.values()), found


@pytest.mark.ranks(2)
def test_views_kept_from_outside_of_a_graph_stay_valid():
    """Views that were made inside GatheredParameters or in a forward without a graph, read when all is released."""
    engine, rank = zero.initialize(model=build(Root), config=config(3, 2))[0], dist.get_rank()
    weight, wanted = engine.module.blocks[2].weight, build(Root).blocks[2].weight
    kept: list[torch.Tensor] = []
    with zero.GatheredParameters(weight):
        kept += [weight.detach(), weight[1:], weight.data.view(-1)]
    handle = engine.module.blocks[0].register_forward_hook(lambda module, *_: kept.append(module.up.weight.t()))
    with torch.no_grad():
        engine(inputs(0, rank), rank)
    handle.remove()
    for _ in range(2):
        engine.backward(engine(inputs(0, rank), rank)["x"].mean())
        engine.step()
    other = build(Root).blocks[0].up.weight
    equal = [torch.equal(a, b) for a, b in zip(kept, [wanted, wanted[1:], wanted.view(-1), other.t()], strict=True)]
    engine.destroy()
    assert equal == [True] * 4
