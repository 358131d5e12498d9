"""The promise: an exception or Ctrl-C in forward, backward or step leaves the engine usable, or it says that it is not.

Exceptions are raised by hooks of the model, by autograd functions and by the optimizer's rule, on all ranks at the
same place. What goes on afterwards has the bits of a run that saw no exception; an engine whose weights are half
updated refuses everything but `destroy()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import each_once, longer
from models import config, make_net, share
from torch import nn

import zero
from zero.optim.fused import FusedShardOptimizer

STEPS = 4
SPOILT = 2  # the step that is tried once in vain first


class Raise(torch.autograd.Function):
    """Passes on what it gets; raises `error` in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ctx.error


def one_step(engine: Any, step: int, backward: Callable[[Any, torch.Tensor], Any] | None = None) -> None:
    """A whole optimizer step, in which `backward` replaces the last call of backward."""
    count = engine.gradient_accumulation_steps()
    for micro in range(count):
        loss = engine(*share(count * step + micro))
        last = micro == count - 1
        backward(engine, loss) if backward is not None and last else engine.backward(loss)
        engine.step()


def in_forward(engine: Any, error: BaseException) -> None:
    def raise_it(*_: Any) -> None:
        raise error

    for name in ("up", "down"):  # on the way into a block, and on the way out of the middle of it
        handle = getattr(engine.module.blocks[1], name).register_forward_pre_hook(raise_it)
        with pytest.raises(type(error)):
            engine(*share(100))
        handle.remove()


def in_backward(engine: Any, error: BaseException) -> None:
    for module in (engine.module.norm, engine.module.blocks[1].norm, engine.module.blocks[0]):
        handle = module.register_forward_hook(lambda module, args, output: Raise.apply(output, error))
        loss = engine(*share(100))
        with pytest.raises(type(error)):
            engine.backward(loss)
        handle.remove()


def in_plain_backward(engine: Any, error: BaseException) -> None:
    handle = engine.module.blocks[1].norm.register_forward_hook(lambda module, args, output: Raise.apply(output, error))
    loss = engine(*share(100))
    with pytest.raises(type(error)):
        loss.backward()
    handle.remove()


def in_last_backward(engine: Any, error: BaseException) -> None:
    """The first micro-batch of a window has gone well already."""
    engine.backward(engine(*share(100)))
    engine.step()
    in_backward(engine, error)


def before_the_update(engine: Any, error: BaseException) -> None:
    """A hyperparameter that no step can be taken with."""
    group = engine.optimizer.param_groups[0]
    right, group["lr"] = group["lr"], "a tenth"
    with pytest.raises(ValueError, match="a tenth"):
        one_step(engine, 100)
    group["lr"] = right


PLACES = [in_forward, in_backward, in_plain_backward, in_last_backward, before_the_update]


def train(stage: int, place: Callable[..., None] | None, error: BaseException) -> list[torch.Tensor]:
    net = make_net()
    settings = config(stage, 2, accumulation=2)
    engine, *_ = zero.initialize(model=net, config=settings)
    for step in range(STEPS):
        if step == SPOILT and place is not None:
            place(engine, error)
        one_step(engine, step)
    counters = [engine.global_steps, engine.micro_steps, engine.global_samples]
    engine.destroy()
    return [*(param.detach() for param in net.parameters()), torch.tensor(counters)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3, *longer(0, 1)])
def test_training_goes_on_with_the_same_bits(stage):
    """From wherever an exception comes."""
    clean = train(stage, None, RuntimeError())
    wrong = []
    for error in (ArithmeticError("spoilt"), KeyboardInterrupt()):
        for place in PLACES:
            found = train(stage, place, error)
            if not all(torch.equal(a, b) for a, b in zip(found, clean, strict=True)):
                wrong.append(f"{type(error).__name__} {place.__name__}")
    assert wrong == []


def half_updated(stage: int, kind: type[BaseException]) -> dict[str, Any]:
    """A step that raises at the second unit of its update, and what the engine does afterwards."""
    net = make_net()
    engine, *_ = zero.initialize(model=net, config=config(stage, 2))
    one_step(engine, 0)
    update, calls = FusedShardOptimizer.update, []

    def second_raises(rule: FusedShardOptimizer, *args: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise kind("no more memory")
        update(rule, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedShardOptimizer, "update", second_raises)
        with pytest.raises(kind):
            one_step(engine, 1)
    said = []
    for call in (
        lambda: engine(*share(2)),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
    ):
        with pytest.raises(RuntimeError) as raised:
            call()
        said.append(str(raised.value))
    with zero.GatheredParameters(net.parameters()):  # what is there may be looked at
        finite = all(param.isfinite().all().item() for param in net.parameters())
    engine.destroy()
    # The module is a plain one, from which a new engine can be made.
    loss = net(*share(2))
    loss.backward()
    plain = all(param.grad is not None and type(param) is nn.Parameter for param in net.parameters())
    net.zero_grad()
    engine, *_ = zero.initialize(model=net, config=config(stage, 2))
    same = torch.equal(engine(*share(2)), loss)
    engine.destroy()
    return {"said": said, "finite": finite, "plain": plain, "same": same}


@pytest.mark.parametrize(("stage", "kind"), each_once([0, 1, 2, 3], [MemoryError, KeyboardInterrupt]))
def test_half_updated_weights_are_refused(pool, stage, kind):
    for rank, found in enumerate(pool.run(2, half_updated, stage, kind)):
        assert found["said"] == 3 * [
            f"the weights are half updated: step 2 ended on rank {rank} with {kind.__name__}: no more memory. "
            "Call destroy(), and go on from a checkpoint with a new engine"
        ]
        assert found["finite"]
        assert found["plain"]
        assert found["same"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_window_begins_anew(stage):
    """A backward that raises between two micro-batches is made up for: the window begins anew, and counts whole."""
    net = make_net()
    engine, *_ = zero.initialize(model=net, config=config(stage, 2, accumulation=2))
    engine.backward(engine(*share(0)))
    engine.step()
    in_backward(engine, ArithmeticError("spoilt"))
    first = engine.micro_steps, engine.is_gradient_accumulation_boundary()
    kept = [unit.gradients.flat is not None or unit.gradients.shard is not None for unit in engine._sharded.trained]
    engine.destroy()
    assert first == (0, False)
    assert not any(kept)


@pytest.mark.ranks(2)
def test_a_release_that_failed_is_repeated_and_destroy_works():
    """What calls raise when the memory of one unit cannot be given back, and whether the weights outlive it."""
    net, said = make_net(), []
    wanted = [param.detach().clone() for param in net.parameters()]
    engine = zero.initialize(model=net, config=config(3, 2))[0]
    unit = next(unit for unit in engine._sharded.units if unit.plan.name == "blocks.1")

    def fail(keep_if_referenced: bool) -> None:
        raise RuntimeError("the storage stays")

    def read() -> None:
        with zero.GatheredParameters(net.parameters()):
            pass

    unit.buffer._free = fail
    for call in (read, lambda: engine(*share(0)), lambda: engine(*share(0))):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    held = [unit.plan.name for unit in engine._sharded.units if unit.holds]
    engine.destroy()
    assert said + held == ["the storage stays"] * 3
    assert all(map(torch.equal, wanted, net.parameters()))
