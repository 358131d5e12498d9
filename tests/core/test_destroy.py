"""The promise: `destroy()` gives back every byte and leaves a plain module, at any moment and on every stage.

Counted by the garbage collector: after `destroy()` and `del` of what `initialize` returned, exactly the tensors are
alive that were there before, which are the module's own whole parameters and buffers.
"""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from alive import alive, only_new
from marks import longer
from models import batch, config, make_net, share
from torch import nn
from torch.utils.data import TensorDataset

import zero
from zero.engine import Engine
from zero.engine.deepspeed_getters import DeepSpeedGetters

BF16 = {"bf16": {"enabled": True}}


def one_micro_step(engine: Any, number: int) -> None:
    engine.backward(engine(*share(number)))
    engine.step()


def at_once(engine: Any) -> None:
    pass


def between_steps(engine: Any) -> None:
    for number in range(4):
        one_micro_step(engine, number)


def in_a_window(engine: Any) -> None:
    for number in range(3):
        one_micro_step(engine, number)


def before_the_step(engine: Any) -> None:
    engine.backward(engine(*share(0)))


def after_a_forward(engine: Any) -> None:
    between_steps(engine)
    engine(*share(0))


def after_an_exception(engine: Any) -> None:
    between_steps(engine)
    handle = engine.module.blocks[1].norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine(*share(0))
    handle.remove()


def after_a_plain_backward_raised(engine: Any) -> None:
    """The engine has not seen it yet."""
    between_steps(engine)
    x = engine.module.embed(torch.tensor([[1, 2]]))
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.module.head(engine.module.blocks[1](x)).sum().backward()


MOMENTS = [
    *(at_once, between_steps, in_a_window, before_the_step),
    *(after_a_forward, after_an_exception, after_a_plain_backward_raised),
]


def make(stage: int, net: nn.Module, **more: Any) -> tuple[Any, ...]:
    data = TensorDataset(*batch(0, 8))
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    settings = config(stage, 2, accumulation=2, scheduler=schedule, **more)
    return zero.initialize(model=net, config=settings, training_data=data)


def hooks_of(net: nn.Module) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_modules = sum(len(getattr(module, table)) for module in net.modules() for table in tables)
    of_params = sum(
        len(param._backward_hooks or ()) + len(param._post_accumulate_grad_hooks or ()) for param in net.parameters()
    )
    return of_modules + of_params


@only_new()
def leftovers(stage: int, moment: Callable[[Any], None], more: dict[str, Any]) -> dict[str, Any]:
    """What is still there after an engine that was destroyed at `moment`."""
    net = make_net()
    if more:
        net.to(torch.bfloat16)  # as the engine leaves it
    before = alive()
    made = make(stage, net, **more)
    moment(made[0])
    engine = made[0]
    engine.destroy()
    engine.destroy()
    dead = [weakref.ref(item) for item in made]
    del made, engine
    after = alive()
    return {
        "alive": [type(ref()).__name__ for ref in dead if ref() is not None],
        "tensors": after.tensors - before.tensors,
        "nbytes": after.nbytes - before.nbytes,
        "ours": sorted(set(after.ours) - set(before.ours)),
        "hooks": hooks_of(net),
        "classes": {type(param) for param in net.parameters()} == {nn.Parameter},
        "owners": any(hasattr(param, "_zero_owner") for param in net.parameters()),
        "separate": len({param.untyped_storage().data_ptr() for param in net.parameters()}),
        "params": len(list(net.parameters())),
    }


def all_moments(stage: int) -> list[tuple[str, dict[str, Any]]]:
    for more in (BF16, {}):  # imports, and what is made once for the process, such as defaults of sections left out
        leftovers(stage, in_a_window, more)
    moments = MOMENTS if stage in (0, 3) else [in_a_window, after_a_plain_backward_raised]
    found = [(moment.__name__, leftovers(stage, moment, {})) for moment in moments]
    return [*found, ("bf16", leftovers(stage, in_a_window, BF16))]


@pytest.mark.parametrize("stage", [3, *longer(0, 1, 2)])
def test_nothing_is_left(pool, stage):
    for rank, cases in enumerate(pool.run(2, all_moments, stage)):
        for name, found in cases:
            wanted = {"alive": [], "tensors": 0, "nbytes": 0, "ours": [], "hooks": 0, "classes": True, "owners": False}
            wanted |= {"separate": found["params"], "params": found["params"]}
            assert found == wanted, f"rank {rank}, {name}"


@only_new()
def state_kept_by_the_optimizer(stage: int) -> tuple[int, int]:
    """Tensors alive beyond those of the module while the user still holds all that `initialize` returned."""
    net = make_net()
    before = alive()
    made = make(stage, net)
    between_steps(made[0])
    made[0].destroy()
    after = alive()
    return after.tensors - before.tensors, after.nbytes - before.nbytes


@pytest.mark.parametrize("stage", [0, 3])
def test_a_destroyed_engine_that_is_still_held_keeps_no_state(pool, stage):
    for tensors, nbytes in pool.run(2, state_kept_by_the_optimizer, stage):
        assert tensors <= 8  # the loader's data, and generators
        assert nbytes < 2000


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_a_second_engine_trains_the_same(stage):
    """A second engine on the same module trains as one on a module that never had an engine."""
    moment = after_an_exception
    losses = []
    for used in (True, False):
        net = make_net()
        if used:
            start = {name: value.clone() for name, value in net.state_dict().items()}
            made = make(stage, net)
            moment(made[0])
            made[0].destroy()
            net.load_state_dict(start)
        engine = make(stage, net)[0]
        losses.append([])
        for number in range(6):
            loss = engine(*share(number))
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
        engine.destroy()
    assert losses[0] == losses[1]


def refused(engine: Any, name: str) -> bool:
    """Whether the destroyed engine says so when asked for this; whatever else it raises comes out."""
    try:
        found = getattr(engine, name)
        if callable(found):
            wanted = [item for item in inspect.signature(found).parameters.values() if item.default is item.empty]
            found(*[None for item in wanted if item.kind is item.POSITIONAL_OR_KEYWORD])
    except RuntimeError as error:
        assert str(error) == "this engine was destroyed; make a new one with zero.initialize", name
        return True
    return False


@pytest.mark.parametrize("more", [{}, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}])
def test_a_destroyed_engine_says_so_whatever_it_is_asked(more):
    engine = zero.initialize(model=make_net(), config={**config(0, 1), **more})[0]
    step = engine.step
    ours = [base for base in Engine.__mro__ if base.__module__.startswith("zero.")]
    names = {name for base in ours for name in vars(base) if not name.startswith("_")}
    engine.destroy()
    engine.destroy()
    assert isinstance(engine, Engine)
    answers = {name for name in names if not refused(engine, name)}
    others = {"destroy", "was_step_applied", "get_global_grad_norm", "is_gradient_accumulation_boundary", "print"}
    assert answers == {name for name in vars(DeepSpeedGetters) if not name.startswith("_")} | others
    assert {"forward", "zero_grad", "state_nbytes", "host_nbytes", "is_compiled", "no_sync"} <= names - answers
    for call in (step, engine, engine.zero_grad):  # looked up before, through the module, by torch's name
        with pytest.raises(RuntimeError, match="this engine was destroyed"):
            call()
    assert engine.eval().module.training is False
    assert len(list(engine.parameters())) == len(list(engine.module.parameters()))


@only_new()
def dropped(stage: int) -> dict[str, Any]:
    """Engine and module are let go without `destroy()`."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    before = alive()
    net = make_net()
    made = make(stage, net)
    logging.getLogger("zero").addHandler(handler)
    in_a_window(made[0])
    dead = [weakref.ref(made[0]), weakref.ref(net), *(weakref.ref(unit) for unit in made[0]._sharded.units)]
    del made, net
    after = alive()
    logging.getLogger("zero").removeHandler(handler)
    return {
        "alive": [type(ref()).__name__ for ref in dead if ref() is not None],
        "tensors": after.tensors - before.tensors,
        "said": said,
        "garbage": len(gc.garbage),
    }


@pytest.mark.parametrize("stage", [2, 3, *longer(0, 1)])
def test_an_engine_that_is_dropped_is_collected_too(pool, stage):
    for found in pool.run(2, dropped, stage):
        assert found == {"alive": [], "tensors": 0, "said": [], "garbage": 0}


@only_new()
def engine_only(stage: int) -> bool:
    """The engine is let go, its module is kept: whether the engine, the optimizer and its moments are gone."""
    net = make_net()
    made = make(stage, net)
    between_steps(made[0])
    rule = made[1].shard_optimizer
    dead = [weakref.ref(made[0]), weakref.ref(made[1]), weakref.ref(rule)]
    del made, rule
    alive()
    return all(ref() is None for ref in dead)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_does_not_keep_its_engine(pool, stage):
    assert pool.run(2, engine_only, stage) == [True, True]


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
DROPPED = [
    *((stage, {}, {}) for stage in (0, 3)),
    (1, OFFLOAD, {}),
    *longer((1, {}, {}), (2, {}, {}), (3, OFFLOAD, {}), (3, {"stage3_param_persistence_threshold": 10**6}, BF16)),
]


def dropped_between(stage: int, section: dict[str, Any], more: dict[str, Any], drop: bool) -> dict[str, Any]:
    """The losses of two engines on one module, of which the first was dropped, or destroyed; and what it has left."""
    net, losses, said = make_net(), [], ""
    settings = config(stage, 2, **{"zero_optimization": {"stage": stage, **section}, **more})
    for index in range(2):
        engine, optimizer, *_ = zero.initialize(model=net, config=settings)
        for number in range(3):
            loss = engine(*share(3 * index + number))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if not drop or index:
            engine.destroy()
        elif dist.get_rank() == 0:
            engine.__dict__["circle"] = [engine]  # such as a trainer object is; the other rank's is in none
            del engine, loss
            gc.collect()
        dist.barrier()
        if drop and not index and stage == 3:  # one rank holds its engine still
            try:
                zero.initialize(model=net, config=settings)
            except RuntimeError as error:
                said = str(error)
        engine = loss = None
        gc.collect()
        if not index:
            plain = not any(hasattr(param, "_zero_owner") for param in net.parameters()) and hooks_of(net) == 0
            with pytest.raises(RuntimeError, match="not attached to an engine"):
                optimizer.step()
    values = [param.detach().float() for param in net.parameters()]
    return {"losses": losses, "values": values, "plain": plain, "said": said}


def dropped_or_destroyed(*case: Any) -> tuple[bool, bool, str]:
    ours, wanted = dropped_between(*case, True), dropped_between(*case, False)
    same = ours["losses"] == wanted["losses"] and all(map(torch.equal, ours["values"], wanted["values"]))
    return same, ours["plain"], ours["said"]


@pytest.mark.parametrize(("stage", "section", "more"), DROPPED)
def test_an_engine_that_was_dropped_gives_its_parameters_back(pool, stage, section, more):
    """At once where they are whole and settled; where they are cut, or updates run, to the next `initialize`."""
    for same, plain, said in pool.run(2, dropped_or_destroyed, stage, section, more):
        assert same
        assert plain == (stage < 3 and not section)
        assert ("of an engine that was dropped" in said) == (stage == 3), said


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_was_swapped_away_does_not_stop_it(stage):
    net = make_net()
    engine, *_ = zero.initialize(model=net, config=config(stage, 1))
    other = torch.nn.Parameter(torch.zeros_like(net.norm.weight))
    torch.utils.swap_tensors(net.norm.weight, other)
    engine.backward(engine(*batch(0, 2)))
    with pytest.raises(RuntimeError, match=r"parameter 'norm.weight' .* its .grad was assigned"):
        engine.step()
    engine.destroy()
    assert net.norm.weight.eq(0).all()
    assert not any(hasattr(param, "_zero_owner") for param in net.parameters())
