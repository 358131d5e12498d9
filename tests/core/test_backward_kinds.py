"""The promise: whatever way a backward runs, recomputed, nested, twice, or for inputs only, the gradients are right."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from matrix_models import Base, Extra
from models import Block, config
from stages import build, check, inputs, one_backward
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
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
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class NoEarlyStop(Blocks):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_early_stop(False):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        return x


class Nested(Blocks):
    """Blocks recomputed inside of what is recomputed, both kinds in each other."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        def outer(y: torch.Tensor, kind: bool) -> torch.Tensor:
            first, second = (self.blocks[:2], self.blocks[2:])[kind]
            return second(checkpoint(first, y, use_reentrant=kind))

        x = checkpoint(outer, x.detach().requires_grad_(), True, use_reentrant=True)
        return checkpoint(outer, x, False, use_reentrant=False)


class Several(Blocks):
    """Several blocks in one go, of both kinds."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint_sequential(list(self.blocks[:2]), 1, x.detach().requires_grad_(), use_reentrant=True)
        return checkpoint(lambda y: self.blocks[3](self.blocks[2](y)), x, use_reentrant=False)


class Parts(Blocks):
    """Parts of a block, the first and the last of them."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block, kind in zip(self.blocks, (True, False, True, False), strict=True):
            y = checkpoint(lambda z, b=block: torch.tanh(b.up(b.norm(z))), x.requires_grad_(), use_reentrant=kind)
            x = x + checkpoint(block.down, y, use_reentrant=not kind)
        return x


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


class Selective(Blocks):
    """What matrices give is kept, the rest is recomputed."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


class TwiceReentrant(Blocks):
    """A block recomputed twice, and a third time not; a gradient comes after its unit was complete."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        x = checkpoint(self.blocks[1], checkpoint(self.blocks[0], x, use_reentrant=True), use_reentrant=True)
        x = self.blocks[0](checkpoint(self.blocks[0], self.blocks[2](x), use_reentrant=True))
        return self.blocks[3](x)


class TwiceOnOneRank(Blocks):
    """The same, where the unit is complete on one rank only, in the first of two recomputations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Extra()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = checkpoint(self.blocks[0], x.detach().requires_grad_(), rank, use_reentrant=True)
        x = checkpoint(self.blocks[0], self.blocks[1](x), rank, use_reentrant=True)
        return self.head(self.blocks[3](self.blocks[2](x))).square().mean()


KINDS = [
    *(Reentrant, NotReentrant, NoEarlyStop, Nested, Several, Parts, PartsOfBlocks, Wrapped, Selective),
    *(TwiceReentrant, TwiceOnOneRank),
]


@pytest.mark.parametrize("kind", [*KINDS[::2], *longer(*KINDS[1::2])], ids=lambda kind: kind.__name__)
def test_checkpointing(pool, kind):
    check(pool, kind)


@pytest.mark.parametrize("kind", [Reentrant, TwiceOnOneRank], ids=lambda kind: kind.__name__)
def test_checkpointing_with_accumulation(pool, kind):
    check(pool, kind, accumulation=2)


def whole(reentrant: bool, model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """The whole model recomputed, twice in one loss."""
    x = x.requires_grad_()
    loss = checkpoint(model, x, rank, use_reentrant=reentrant)
    loss = loss + checkpoint(model, x * 2, rank, use_reentrant=reentrant)
    (loss * factor).backward()
    return loss.detach()


def whole_reentrant(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    return whole(True, model, x, rank, factor)


def whole_not_reentrant(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    return whole(False, model, x, rank, factor)


def several_forwards(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    loss = model(x, rank) + model(x * 2, rank) * model(x - 1, rank)
    (loss * factor).backward()
    return loss.detach()


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
    (loss * factor).backward()
    return loss.detach()


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
    loss = loss + model(x * 2, rank) + direction.square().sum()
    (loss * factor).backward()
    return loss.detach()


def for_parameters(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """Gradients of named parameters alone, then a penalty on those of all: the backward goes through a backward."""
    params, loss = dict(model.named_parameters()), model(x, rank)
    part = getattr(model, "module", model).body(x).sum()
    by = params if torch.__version__ >= "2.13" else list(params.values())
    body = torch.autograd.grad(part, by, retain_graph=True, materialize_grads=True)
    only = torch.autograd.grad(part * 2, next(iter(params.values())))
    loss = loss * (1 + sum(grad.abs().mean() for grad in (*(body.values() if by is params else body), *only)))
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    loss = loss + sum(grad.square().sum() for grad in grads)
    (loss * factor).backward()
    return loss.detach()


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
    loss = loss + late if rank == 1 else loss
    (loss * factor).backward()
    return loss.detach()


def adapted(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """Learning to learn: the loss after a step on another, which the backward goes through."""
    inner = getattr(model, "module", model)
    names, params = zip(*inner.named_parameters(), strict=True)
    with zero.GatheredParameters(params):
        grads = torch.autograd.grad(model(x, rank), params, create_graph=True)
        moved = [param - 0.1 * grad for param, grad in zip(params, grads, strict=True)]
        values = dict(zip(names, moved, strict=True))
        loss = torch.func.functional_call(inner, values, (x * 2, rank))
    (loss * factor).backward()
    return loss.detach()


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
    (loss * factor).backward()
    return loss.detach()


def growing(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """A generation loop before the training forward."""
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            x = torch.cat([x, x[-1:] + model(x, rank)])
    model.train()
    return one_backward(model, x, rank, factor)


LOOPS = [
    *(whole_reentrant, whole_not_reentrant, several_forwards, in_between, retained, for_inputs),
    *(penalty, for_parameters, one_by_one, weights, adapted, transformed, growing),
]


@pytest.mark.parametrize("loop", [*LOOPS[::2], *longer(*LOOPS[1::2])], ids=lambda loop: loop.__name__)
def test_loop(pool, loop):
    check(pool, Blocks, loop)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "loop"),
    [(Reentrant, one_backward), (Nested, one_backward), (Blocks, whole_reentrant)],
    ids=lambda each: each.__name__,
)
def test_a_backward_ends_once_with_the_outermost(kind, loop):
    """How many times the end of a backward was seen in one, by stage."""
    rank, found = dist.get_rank(), []
    for stage in range(4):
        engine, *_ = zero.initialize(model=build(kind), config=config(stage, 2))
        reducer = engine._sharded.reducer
        loop(engine, inputs(0, rank), rank, 1.0)
        found.append(reducer.rounds)
        assert not reducer.open
        engine.destroy()
    assert found == [1, 1, 1, 1]


def most_alive(kind: type[nn.Module]) -> int:
    """The most blocks that are whole at once while gradients land, in the third step."""
    engine, *_ = zero.initialize(
        model=build(kind),
        config={**config(3, 2), "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1}},
    )
    rank, most = dist.get_rank(), 0
    units = [unit for unit in engine._sharded.units if unit.plan.name.startswith("blocks")]

    def look(param: nn.Parameter) -> None:
        nonlocal most
        most = max(most, sum(unit.full.untyped_storage().nbytes() > 0 for unit in units))

    for step in range(3):
        if step == 2:
            for param in engine.module.parameters():
                param.register_post_accumulate_grad_hook(look)
        engine.backward(engine(inputs(step, rank), rank))
        engine.step()
    engine.destroy()
    return most


@pytest.mark.parametrize("kind", [Blocks, Reentrant, NotReentrant, PartsOfBlocks], ids=lambda kind: kind.__name__)
def test_blocks_are_released_as_their_gradients_land(pool, kind):
    assert all(most <= 3 for most in pool.run(2, most_alive, kind))
