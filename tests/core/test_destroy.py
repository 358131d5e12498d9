"""The promise: `destroy()` gives back every byte and leaves a plain module, at any moment and on every stage.

Counted by the garbage collector: after `destroy()` and `del` of what `initialize` returned, exactly the tensors are
alive that were there before, which are the module's own whole parameters and buffers.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from alive import alive, only_new
from marks import longer
from models import batch, config, make_net, share, step
from ranks import listening, said_by
from scenario import settings
from torch import nn
from torch.utils.data import TensorDataset

import zero
from zero.engine import Engine
from zero.engine.getters import DeepSpeedGetters


@only_new()
def dropped(stage: int, with_module: bool) -> dict[str, Any]:
    """What is still there after an engine, and maybe its module, were let go without `destroy()`."""
    before = alive()
    net = make_net()
    made = make(stage, net)
    with listening() as said:
        steps(made[0], 3)
        dead = [weakref.ref(each) for each in (*made[:2], made[1].shard_optimizer, *([net] if with_module else []))]
        del made
        if with_module:
            del net
        after = alive()
    gone = all(ref() is None for ref in dead)
    return {
        "gone": gone,
        "tensors": (after.tensors - before.tensors) * with_module,
        "said": said,
        "garbage": gc.garbage,
    }


BF16 = {"bf16": {"enabled": True}}


def steps(engine: Any, count: int = 4) -> None:
    for number in range(count):
        step(engine, number)


def after_an_exception(engine: Any) -> None:
    steps(engine)
    handle = engine.module.blocks[1].norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine(*share(0))
    handle.remove()


def after_a_plain_backward_raised(engine: Any) -> None:
    """The engine has not seen it yet."""
    steps(engine)
    x = engine.module.embed(torch.tensor([[1, 2]], device=engine.device))
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.module.head(engine.module.blocks[1](x)).sum().backward()


MOMENTS: dict[str, Callable[[Any], Any]] = {
    "in a window": lambda engine: steps(engine, 3),
    "after a plain backward raised": after_a_plain_backward_raised,
    "at once": lambda engine: None,
    "between steps": steps,
    "before the step": lambda engine: engine.backward(engine(*share(0))),
    "after a forward": lambda engine: (steps(engine), engine(*share(0))),
    "after an exception": after_an_exception,
}


def make(stage: int, net: nn.Module, **more: Any) -> tuple[Any, ...]:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    json = settings(stage, 2, accumulation=2, scheduler=schedule, **more)
    return zero.initialize(model=net, config=json, training_data=TensorDataset(*batch(0, 8)))


def hooks_of(net: nn.Module) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_modules = sum(len(getattr(module, table)) for module in net.modules() for table in tables)
    of_params = sum(
        len(param._backward_hooks or ()) + len(param._post_accumulate_grad_hooks or ()) for param in net.parameters()
    )
    return of_modules + of_params


def leftovers(stage: int, moment: str, more: dict[str, Any]) -> dict[str, Any]:
    """What is still there after an engine that was destroyed at `moment`."""
    net = make_net()
    if more:
        net.to(torch.bfloat16)  # as the engine leaves it
    before = alive()
    made = make(stage, net, **more)
    MOMENTS[moment](made[0])
    made[0].destroy()
    made[0].destroy()
    held = alive()
    dead = [weakref.ref(item) for item in made]
    del made
    after = alive()
    return {
        "held": held.nbytes - before.nbytes < 2000,  # the loader's data, and generators
        "alive": [type(ref()).__name__ for ref in dead if ref() is not None],
        "tensors": after.tensors - before.tensors,
        "nbytes": after.nbytes - before.nbytes,
        "ours": sorted(set(after.ours) - set(before.ours)),
        "hooks": hooks_of(net),
        "classes": {type(param) for param in net.parameters()} == {nn.Parameter},
        "separate": len({param.untyped_storage().data_ptr() for param in net.parameters()}),
    }


@only_new()
def all_moments(stage: int) -> dict[str, dict[str, Any]]:
    for more in (BF16, {}):  # imports, and what is made once for the process, such as defaults of sections left out
        leftovers(stage, "in a window", more)
    moments = list(MOMENTS) if stage in (0, 3) else list(MOMENTS)[:2]
    return {moment: leftovers(stage, moment, {}) for moment in moments} | {"16": leftovers(stage, moments[0], BF16)}


@pytest.mark.parametrize("stage", [3, *longer(0, 1, 2)])
def test_nothing_is_left(pool, stage):
    """Nor do engine, optimizer and loader keep any state while the user still holds them."""
    wanted = {"held": True, "alive": [], "tensors": 0, "nbytes": 0, "ours": [], "hooks": 0, "classes": True}
    wanted |= {"separate": len(list(make_net().parameters()))}
    for rank, cases in enumerate(pool.run(2, all_moments, stage)):
        for name, found in cases.items():
            assert found == wanted, f"rank {rank}, {name}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [3, *longer(0, 1, 2)])
def test_a_process_group_ends_when_it_is_destroyed_and_not_with_the_engine(stage):
    """Else gloo's threads would go on beside the end of the interpreter, and may abort the process."""
    group = dist.new_group([0, 1])
    ref = weakref.ref(group)
    mpu = SimpleNamespace(get_data_parallel_group=lambda: ref())
    engine, *_ = zero.initialize(model=make_net(), config=config(stage, 2), mpu=mpu)
    steps(engine, 2)
    dist.barrier(group)
    dist.destroy_process_group(group)
    del group
    if stage in (1, 2):  # what the last step has sent is still to be read
        assert ref() is not None
        assert all(param.isfinite().all() for param in engine.module.parameters())
    assert ref() is None
    if stage == 3:
        assert "the process group was destroyed; call zero.initialize() again" in said_by(lambda: steps(engine, 1))
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_a_second_engine_trains_the_same(stage):
    """A second engine on the same module trains as one on a module that never had an engine."""
    losses = []
    for used in (True, False):
        net = make_net()
        if used:
            engine = make(stage, net)[0]
            after_an_exception(engine)
            engine.destroy()
            net.load_state_dict(make_net().state_dict())
        engine = make(stage, net)[0]
        losses.append([step(engine, number).item() for number in range(6)])
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


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
DROPPED = [
    *((3, {}, "fp32"), (1, OFFLOAD, "fp32")),
    *longer((0, {}, "fp32"), (3, OFFLOAD, "fp32")),
    *longer((3, {"stage3_param_persistence_threshold": 10**6}, "bf16")),
]


def dropped_between(json: dict[str, Any], drop: bool) -> tuple[list[float], list[torch.Tensor], str]:
    """The losses of two engines on one module, of which the first was dropped, or destroyed; and what was said."""
    net, losses, said = make_net(), [], ""
    section = json["zero_optimization"]
    cut = section["stage"] == 3 or "offload_optimizer" in section
    for index in range(2):
        engine, optimizer, *_ = zero.initialize(model=net, config=json)
        losses += [step(engine, 3 * index + number).item() for number in range(3)]
        if not drop or index:
            engine.destroy()
        elif dist.get_rank() == 0:
            engine.__dict__["circle"] = [engine]  # such as a trainer object is; the other rank's is in none
            del engine
            gc.collect()
        dist.barrier()
        if drop and not index and section["stage"] == 3:  # one rank holds its engine still
            said = said_by(lambda: zero.initialize(model=net, config=json))
        engine = None
        gc.collect()
        assert cut or hooks_of(net) == 0, "given back at once"
        with pytest.raises(RuntimeError, match="not attached to an engine"):
            optimizer.step()
    return losses, [param.detach().float() for param in net.parameters()], said


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "section", "precision"), DROPPED)
def test_an_engine_that_was_dropped_gives_its_parameters_back(stage, section, precision):
    """At once where they are whole and settled; where they are cut, or updates run, to the next `initialize`."""
    json = settings(stage, 2, section=section, precision=precision)
    (losses, values, said), (wanted, destroyed, _) = (dropped_between(json, drop) for drop in (True, False))
    assert losses == wanted and all(map(torch.equal, values, destroyed))
    assert ("of an engine that was dropped" in said) == (stage == 3), said


@pytest.mark.parametrize(
    ("stage", "with_module"), [(2, True), (3, True), (1, False), (3, False), *longer((0, True), (1, True))]
)
def test_an_engine_that_is_dropped_is_collected_too(pool, stage, with_module):
    """A module does not keep its engine."""
    for found in pool.run(2, dropped, stage, with_module):
        assert found == {"gone": True, "tensors": 0, "said": [], "garbage": []}
