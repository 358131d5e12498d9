"""The promise: an exception or Ctrl-C in forward, backward or step leaves the engine usable, or it says that it is not.

Exceptions are raised by hooks of the model, by autograd functions and by the optimizer's rule, on all ranks at the
same place. What goes on afterwards has the bits of a run that saw no exception; an engine whose weights are half
updated refuses everything but `destroy()`.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import each_once, longer
from models import config, make_net, share, step
from ranks import said_by
from scenario import differences, run
from torch import nn

import zero
from zero.optim.fused import FusedShardOptimizer


class Raise(torch.autograd.Function):
    """Passes on what it gets; raises `error` in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ctx.error


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
        step(engine, 100), step(engine, 101)
    group["lr"] = right


PLACES = [in_forward, in_backward, in_plain_backward, in_last_backward, before_the_update]


def spoilt(place: Callable[..., None], error: BaseException, engine: Any, number: int, args: Any) -> torch.Tensor:
    """The third step, of two micro-batches, is tried once in vain first."""
    if number == 4:
        place(engine, error)
    engine.backward(loss := engine(*args))
    return loss


def counters(engine: Any) -> list[int]:
    return [engine.global_steps, engine.micro_steps, engine.global_samples]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [3, *longer(0, 2)])
def test_training_goes_on_with_the_same_bits(stage):
    """From wherever an exception comes."""
    train = functools.partial(run, "net", stage, 4, keep=counters, accumulation=2)
    clean, wrong = train(), []
    for error, places in ((ArithmeticError("spoilt"), PLACES), (KeyboardInterrupt(), PLACES[:2])):
        for place in places:
            if differs := differences(train(loop=functools.partial(spoilt, place, error)), clean, "weights", "seen"):
                wrong.append(f"{type(error).__name__} {place.__name__}: {differs}")
    assert wrong == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "kind"), each_once([0, 1, 2, 3], [MemoryError, KeyboardInterrupt]))
def test_half_updated_weights_are_refused(stage, kind):
    """A step raises at the second unit of its update; the module is a plain one after `destroy()`."""
    net = make_net()
    engine, *_ = zero.initialize(model=net, config=config(stage, 2))
    step(engine, 0)
    update, calls = FusedShardOptimizer.update, []

    def second_raises(rule: FusedShardOptimizer, *args: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise kind("no more memory")
        update(rule, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedShardOptimizer, "update", second_raises)
        with pytest.raises(kind):
            step(engine, 1)
    for call in (
        lambda: engine(*share(2)),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
    ):
        assert said_by(call).partition(": ")[2] == (
            f"the weights are half updated: step 2 ended on rank {engine.global_rank} with {kind.__name__}: "
            "no more memory. Call destroy(), and go on from a checkpoint with a new engine"
        )
    with zero.GatheredParameters(net.parameters()):  # what is there may be looked at
        assert all(param.isfinite().all() for param in net.parameters())
    engine.destroy()
    loss = net(*share(2))
    loss.backward()
    assert all(param.grad is not None and type(param) is nn.Parameter for param in net.parameters())
    net.zero_grad()
    engine, *_ = zero.initialize(model=net, config=config(stage, 2))
    assert torch.equal(engine(*share(2)), loss)
    engine.destroy()


def test_exceptions_of_ours_cross_processes_as_they_are():
    for path in sorted(Path(zero.__file__).parent.rglob("*.py")):
        parts = path.relative_to(Path(zero.__file__).parents[1]).with_suffix("").parts
        # Importing a door opens it; Lightning and bokeh are extras.
        extra = "lightning" in parts or (parts[1:3] == ("tools", "report") and not importlib.util.find_spec("bokeh"))
        if parts[-1] != "__main__" and parts[1] != "as_deepspeed" and not extra:
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    kinds, looked_at = [], [Exception]
    while looked_at:
        for kind in type.__subclasses__(looked_at.pop()):
            looked_at.append(kind)
            kinds += [kind] if kind.__module__.partition(".")[0] == "zero" else []
    assert {"ConfigError", "ScheduleError", "Damaged", "LaunchError"} <= {kind.__name__ for kind in kinds}
    arguments = {"ConfigError": (["fp16.enabled: got 3, wanted true or false", "second"], "zero.json")}
    for kind in kinds:
        error = kind(*arguments.get(kind.__name__, ("lr: wanted a number",)))
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
