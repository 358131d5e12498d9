"""The promise: whatever way a backward runs, recomputed, nested, twice, or for inputs only, the gradients are right."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from marks import longer
from matrix_models import Base, Extra
from models import Block
from oracle import backward
from scenario import settings
from stages import build, check, inputs, one_backward
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import zero


class Blocks(Base):
    """Four blocks and a head; the subclasses recompute something."""

    def __init__(self) -> None:
        super().__init__(blocks=4)


class Reentrant(Blocks):
    """Every block but the first, reentrant, and nothing else needs a gradient behind them."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class NotReentrant(Blocks):
    """Every block, with further options of `checkpoint`."""

    early_stop = True
    options: ClassVar[dict[str, Any]] = {}

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_early_stop(self.early_stop):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, **self.options)
        return x


class NoEarlyStop(NotReentrant):
    early_stop = False


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(NotReentrant):
    """What matrices give is kept, the rest is recomputed."""

    options: ClassVar[dict[str, Any]] = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}


class Nested(Blocks):
    """Two blocks in one go, of which one is recomputed again inside, both kinds in each other."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        def outer(y: torch.Tensor, kind: bool) -> torch.Tensor:
            first, second = (self.blocks[:2], self.blocks[2:])[kind]
            return second(checkpoint(first, y, use_reentrant=kind))

        x = checkpoint(outer, x.detach().requires_grad_(), True, use_reentrant=True)
        return checkpoint(outer, x, False, use_reentrant=False)


class PartsOfBlocks(Blocks):
    """The same inside the blocks' own forward."""

    def __init__(self) -> None:
        super().__init__()
        for index, block in enumerate(self.blocks):
            block.forward = functools.partial(self.half, block, index % 2 == 0)

    @staticmethod
    def half(block: Block, kind: bool, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda z: torch.tanh(block.up(z)), block.norm(x), use_reentrant=kind)
        return x + checkpoint(block.down, y, use_reentrant=kind)


class Wrapped(Blocks):
    """torch's wrapper modules, which put a level between the names."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT)
        for index in range(4):
            self.blocks[index] = checkpoint_wrapper(self.blocks[index], checkpoint_impl=kinds[index % 2])


class TwiceOnOneRank(Blocks):
    """The same, where the unit is complete on one rank only, in the first of two recomputations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Extra()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = checkpoint(self.blocks[0], x.detach().requires_grad_(), rank, use_reentrant=True)
        x = checkpoint(self.blocks[0], self.blocks[1](x), rank, use_reentrant=True)
        return self.head(self.blocks[3](self.blocks[2](x))).square().mean()


KINDS = [Reentrant, Nested, PartsOfBlocks]
MORE = [NoEarlyStop, Wrapped, Selective]


@pytest.mark.parametrize("kind", [*KINDS, *longer(*MORE)], ids=lambda kind: kind.__name__)
def test_checkpointing(pool, kind):
    check(pool, kind)


def test_checkpointing_with_accumulation(pool):
    check(pool, TwiceOnOneRank, accumulation=2)


def whole_reentrant(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """The whole model recomputed, twice in one loss."""
    x = x.requires_grad_()
    loss = checkpoint(model, x, rank, use_reentrant=True)
    return backward(loss + checkpoint(model, x * 2, rank, use_reentrant=True), factor)


def several_forwards(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    return backward(model(x, rank) + model(x * 2, rank) * model(x - 1, rank), factor)


def in_between(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """Forwards without gradients, in eval, under inference_mode, before, between forward and backward, and after."""
    loss = model(x, rank)
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model(x + 1, rank)
    with torch.inference_mode():
        model(x + 1, rank)
    model.train()
    (loss * factor).backward()
    with torch.inference_mode():
        model(x, rank)
    return loss.detach()


def retained(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    loss = model(x, rank) / 2
    (loss * factor).backward(retain_graph=True)
    return backward(loss, factor)


def for_inputs(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """A gradient of the inputs alone, then the usual backward of the same graph."""
    x = x.requires_grad_()
    loss = model(x, rank)
    (direction,) = torch.autograd.grad(loss, x, retain_graph=True)
    ((loss + model(x + direction.sign(), rank)) * factor).backward()
    return loss.detach()


def penalty(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """A penalty on the gradient of the inputs: the backward goes through a backward."""
    x = x.requires_grad_()
    loss = model(x, rank)
    (direction,) = torch.autograd.grad(loss, x, create_graph=True)
    return backward(loss + model(x * 2, rank) + direction.square().sum(), factor)


def for_parameters(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """Gradients of named parameters alone, then a penalty on those of all: the backward goes through a backward."""
    params, loss = dict(model.named_parameters()), model(x, rank)
    part = getattr(model, "module", model).body(x).sum()
    by = params if torch.__version__ >= "2.13" else list(params.values())
    body = torch.autograd.grad(part, by, retain_graph=True, materialize_grads=True)
    only = torch.autograd.grad(part * 2, next(iter(params.values())))
    loss = loss * (1 + sum(grad.abs().mean() for grad in (*(body.values() if by is params else body), *only)))
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    return backward(loss + sum(grad.square().sum() for grad in grads), factor)


def one_by_one(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """Backward passes that are each for some of the parameters."""
    params, loss = list(model.parameters()), model(x, rank)
    (loss * factor).backward(inputs=params[::2], retain_graph=True)
    torch.autograd.backward(loss * factor, inputs=params[3], retain_graph=True)
    torch.autograd.backward(loss * factor, inputs=params[1:3] + params[5::2])
    return loss.detach()


def weights(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """Terms of the loss on weights that are whole for them only, before and after the forward, one on one rank."""
    params = list(model.parameters())
    with zero.GatheredParameters(params):
        term = sum(param.square().sum() for param in params)
        square = [param for param in params if param.dim() == 2]
        with zero.GatheredParameters(square):
            term = term + sum((param.t() @ param).tanh().sum() for param in square)
    loss = model(x, rank) + 1e-2 * term
    with zero.GatheredParameters(params[3:]):
        late = sum(param.detach().cos() @ param.pow(3) for param in params[3:] if param.dim() == 1)
    return backward(loss + late if rank == 1 else loss, factor)


def adapted(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """Learning to learn: the loss after a step on another, which the backward goes through."""
    inner = getattr(model, "module", model)
    names, params = zip(*inner.named_parameters(), strict=True)
    with zero.GatheredParameters(params):
        grads = torch.autograd.grad(model(x, rank), params, create_graph=True)
        moved = [param - 0.1 * grad for param, grad in zip(params, grads, strict=True)]
        values = dict(zip(names, moved, strict=True))
        loss = torch.func.functional_call(inner, values, (x * 2, rank))
    return backward(loss, factor)


def transformed(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """Transforms of torch.func by own weights, by parameters, by the input; the backward goes through the last."""
    inner = getattr(model, "module", model)
    params = dict(inner.named_parameters())

    def call(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(inner, values, (x, rank))

    with zero.GatheredParameters(params.values()):
        own = {name: param.detach().clone() for name, param in params.items()}
        found = [torch.func.grad(call)(own, x), torch.func.vmap(torch.func.grad(call), (None, 0))(params, x[:, None])]
    loss = 1 + sum(grad.detach().square().sum() for grads in found for grad in grads.values())
    loss = loss * (model(x, rank) + torch.func.grad(lambda x: model(x, rank))(x).square().sum())
    return backward(loss, factor)


def growing(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """A generation loop before the training forward."""
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            x = torch.cat([x, x[-1:] + model(x, rank)])
    model.train()
    return one_backward(model, x, rank, factor)


LOOPS = [whole_reentrant, retained, penalty, one_by_one, adapted]
MORE_LOOPS = [several_forwards, in_between, for_inputs, for_parameters, weights, transformed, growing]


@pytest.mark.parametrize("loop", [*LOOPS, *longer(*MORE_LOOPS)], ids=lambda loop: loop.__name__)
def test_loop(pool, loop):
    check(pool, Blocks, loop)


def most_alive(kinds: list[type[nn.Module]]) -> dict[str, int]:
    """The most blocks that are whole at once while gradients land, in the third step."""
    rank, most = dist.get_rank(), {}
    for kind in kinds:
        engine, *_ = zero.initialize(
            model=build(kind), config=settings(3, 2, section={"stage3_prefetch_bucket_size": 1})
        )

        def look(param: nn.Parameter, engine: Any = engine, name: str = kind.__name__) -> None:
            units = engine.describe().units
            whole = sum(unit.name.startswith("blocks") and unit.state != "sharded" for unit in units)
            most[name] = max(most.get(name, 0), whole)

        for step in range(3):
            if step == 2:
                for param in engine.module.parameters():
                    param.register_post_accumulate_grad_hook(look)
            engine.backward(engine(inputs(step, rank), rank))
            engine.step()
        engine.destroy()
    return most


def test_blocks_are_released_as_their_gradients_land(pool):
    for most in pool.run(2, most_alive, [Blocks, Reentrant, NotReentrant, PartsOfBlocks]):
        assert len(most) == 4 and all(1 <= count <= 3 for count in most.values()), most
