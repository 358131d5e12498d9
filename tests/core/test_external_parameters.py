"""The promise: a module may read parameters of another one in its forward, and nobody has to say so."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDTH, Block, config
from ranks import said_by
from stages import build, check, inputs
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero


class Base(nn.Module):
    """Two blocks, and a matrix in a block of its own that the subclasses read from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), nn.Linear(WIDTH, WIDTH)])

    @property
    def other(self) -> nn.Linear:
        return self.blocks[2]

    def through(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


class ByRoot(Base):
    """The root reads it, once before its own module runs and once after."""

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.through(F.linear(x, self.other.weight))
        x = self.other(x)
        return (self.other.weight.t() @ x.t()).square().mean() + x.mean()


class ByBlock(Base):
    """A block reads it in the middle of its forward, and it is used nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].peer = [self.other]  # in a list: no submodule
        self.blocks[0].forward = lambda x: Block.forward(self.blocks[0], x) + x @ self.other.weight + self.other.bias

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.through(x).square().mean()


class Penalty(nn.Module):
    """A module without parameters that is given some."""

    def forward(self, x: torch.Tensor, params: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x.square().mean() + sum(param.square().sum() for param in params)


class ByLoss(Base):
    """A loss without parameters of its own reads a tuple of them."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = Penalty()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.loss(self.through(x), tuple(self.other.parameters()))


class ByFunctionalCall(Base):
    """torch.func.functional_call with tensors made from another module's parameters."""

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        doubled = {name: 2 * param for name, param in self.other.named_parameters()}
        x = torch.func.functional_call(self.other, doubled, (self.through(x),))
        own = dict(self.other.named_parameters())
        return torch.func.functional_call(self.other, own, (x,)).square().mean()


class ByCheckpoint(Base):
    """A function that is recomputed reads it, in both kinds of checkpointing."""

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.blocks[0](x)
        x = checkpoint(lambda y: torch.tanh(F.linear(y, self.other.weight)), x, use_reentrant=False)
        x = checkpoint(lambda y: self.blocks[1](F.linear(y, self.other.weight)), x, use_reentrant=True)
        return x.square().mean()


class Registered(Base):
    """Told by hand in a constructor, to a module with and to one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = Penalty()
        for module in (self.blocks[1], self.loss):
            zero.register_external_parameter(module, self.other.weight)
            zero.register_external_parameter(module, self.other.weight)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.loss(self.through(x), (self.other.weight,))


KINDS = [ByBlock, ByLoss, ByFunctionalCall, ByCheckpoint, Registered, ByRoot]


@pytest.mark.parametrize("kind", [*KINDS[:5], *longer(*KINDS[5:])], ids=lambda kind: kind.__name__)
def test_what_another_module_reads_is_there(pool, kind):
    check(pool, kind)


def engine_of(kind: type[nn.Module]) -> Any:
    return zero.initialize(model=build(kind), config=config(3, 2))[0]


def away(engine: Any, name: str = "") -> bool:
    """Whether the units of this name, or all, are cut now."""
    return all(unit.state == "sharded" for unit in engine.describe().units if unit.name.startswith(name))


@pytest.mark.ranks(2)
def test_it_goes_when_the_module_has_ended():
    """The foreign parameters are away: at rest, after a forward, after a backward, inside no_grad after it."""
    engine, rank = engine_of(ByBlock), dist.get_rank()
    for step in range(2):
        assert away(engine, "blocks.2")
        loss = engine(inputs(step, rank), rank)
        assert away(engine, "blocks.2")
        engine.backward(loss)
        assert away(engine, "blocks.2")
        engine.step()
    with torch.no_grad():
        engine(inputs(0, rank), rank)
    assert away(engine, "blocks.2")
    engine.destroy()


class Scaled(nn.Module):
    """Has no parameters but those of its child, which it reads without calling it; so does a method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, self.inner.weight))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Of `x`: by a read of its own, a call of its own, and a forward."""
        return self(x) + self.inner(x) * self.inner.weight.sum()


class ByMethod(Base):
    """What a user calls beside the forward: the wrapper, and methods that read parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapper = Scaled()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.wrapper(self.through(x)).square().mean()

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        """Reads parameters, calls forwards, and keeps no graph."""
        with torch.no_grad():
            return x @ self.other.weight + self.through(x) + self.wrapper.features(x) + self.other(x)


def by_method(stage: int) -> list[torch.Tensor]:
    """What calls outside of the engine's forward give, also their gradients."""
    engine, rank = zero.initialize(model=build(ByMethod), config=config(stage, 2))[0], dist.get_rank()
    model, x, found = engine.module, inputs(0, rank), []
    zero.register_forward_method(model.wrapper, "features")
    zero.register_forward_method(model.wrapper, "features")
    for _ in range(3):
        found.append(engine.generate(x))
        assert stage < 3 or away(engine)
        with torch.no_grad():
            found += [model.wrapper(x), model.wrapper.features(x)]
        assert stage < 3 or away(engine)
        loss = engine(model.wrapper.features(model.wrapper(x)), rank)
        engine.backward(loss + model.wrapper.features(x).mean())
        assert stage < 3 or away(engine)
        engine.step()
        found.append(loss.detach())
    assert stage < 3 or "zero.register_forward_method(module, name)" in said_by(lambda: model.generate(x))
    with pytest.raises(TypeError, match="takes 2 positional arguments"):
        engine.generate(x, 2)
    found.append(engine.generate(x))
    with zero.GatheredParameters(model.parameters()):
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model.wrapper)))
    found += [copied.features(x).detach(), copied(x).detach()]
    engine.destroy()
    return [*found, model.generate(x), model.wrapper.features(x).detach()]


@pytest.mark.ranks(2)
def test_methods_and_wrappers_called_on_their_own_find_what_they_read():
    whole, cut = by_method(0), by_method(3)
    assert len(whole) == len(cut) and all(map(torch.equal, whole, cut))


def test_wrong_methods():
    engine = zero.initialize(model=build(Base), config=config(0, 1))[0]
    with pytest.raises(AttributeError, match="the module of this engine, a Base, has no method 'generate'"):
        engine.generate()
    with pytest.raises(AttributeError, match="no attribute 'feature'"):
        zero.register_forward_method(engine.module, "feature")
    with pytest.raises(TypeError, match="got str, wanted an nn"):
        zero.register_forward_method("module", "feature")
    engine.destroy()


@pytest.mark.ranks(2)
def test_registering_and_unregistering_after_initialize():
    engine, seen = engine_of(Base), []
    block, weight = engine.module.blocks[0], engine.module.other.weight
    block.up.register_forward_hook(lambda *_: seen.append(not away(engine, "blocks.2")))
    x = inputs(0, dist.get_rank())
    block(x)
    zero.register_external_parameter(block, weight)
    block(x)
    zero.unregister_external_parameter(block, weight)
    block(x)
    engine.destroy()
    assert seen == [False, True, False]


def test_wrong_registrations():
    module, param = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="a parameter is external to a module; got str"):
        zero.register_external_parameter("module", param)
    with pytest.raises(RuntimeError, match="only a parameter can be external; got Tensor"):
        zero.register_external_parameter(module, torch.ones(2))
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(2,\) is not registered as external to Linear"):
        zero.unregister_external_parameter(module, param)


def test_also_when_units_are_kept_between_uses(pool):
    check(pool, ByRoot, section={"stage3_max_reuse_distance": 10_000})
