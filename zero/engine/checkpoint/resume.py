"""The state of a run besides weights and optimizer state: taken from one engine, put into another.

`shared_state` is the same on all ranks: plain values and tensors, as `zero.checkpoint.plain_values` encodes; they are
not copies, so encode them before training goes on. Each rank's own are its random numbers, see `random_state`.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from zero.data import Loader, RepeatingLoader
from zero.engine.checkpoint import random_state
from zero.log import counted, rank_zero

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_NOT_STATE = ("params", "param_names")  # of a parameter group: what it holds, not how that is updated
# What schedulers read and write in a parameter group; the first, where they move the momentum, too.
_MOMENTUM = ("betas", "momentum")
_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, weakref.ref)


def shared_state(engine: Any) -> dict[str, Any]:
    """Counters, scheduler, loss scale, data position, hyperparameters, `zero.alarm`'s window, the seed of a "tree".

    To be asked between accumulation windows, whose gradients are in no checkpoint. What `zero.recompute` with policy
    "auto" has chosen is no state: it changes no number, and is measured again for the batch and the device of then.
    """
    optimizer, scheduler, loader = engine.optimizer, engine.lr_scheduler, _loader(engine)
    scaler = optimizer.loss_scaler if optimizer is not None else None
    training = engine._training
    replicas, randomness, alarms = training.replicas, training.randomness, training.alarms
    counters = {name: getattr(engine, name) for name in _COUNTERS} | {"micro_steps": engine._accumulation.start}
    return {
        "counters": counters,
        "scheduler": None if scheduler is None else _of_scheduler(scheduler),
        "loss_scaler": scaler.state_dict() if scaler is not None and (scaler.rule or scaler.unit) else None,
        "data": None if loader is None else loader.state_dict(),
        "groups": None if optimizer is None else [_of_group(group) for group in optimizer.param_groups],
        "randomness": None if randomness is None else randomness.state_dict(),
        "own_buffers": None if replicas is None else replicas.own_buffers,
        "alarms": None if alarms is None else alarms.state_dict(),
    }


def restore(
    engine: Any,
    shared: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    *,
    optimizer: bool,
    scheduler: bool,
) -> None:
    """Put back what `shared_state` took, in this run or another; gradients that are there are dropped.

    optimizer: the hyperparameters of the parameter groups and the loss scale, too. scheduler: its state, too, and what
    it reads and writes in the groups; without it, that stays as the engine's scheduler has it. `own`: with this rank's
    random numbers; None leaves them alone. After `check`. What only one side has is said in a warning and left alone.
    """
    training = engine._training
    if engine.optimizer is not None:
        engine.optimizer.conclude()
    engine._sharded.reducer.abandon()
    for name in _COUNTERS:
        setattr(engine, name, int(shared["counters"][name]))
    engine._accumulation.resume()
    engine._status.step_applied = False
    engine._sharded.world.watchdog.status.steps = engine.global_steps

    takes = scheduler and _both("a learning-rate scheduler", shared["scheduler"], engine.lr_scheduler)
    takes = takes and _load_scheduler(engine.lr_scheduler, shared["scheduler"])
    if engine.optimizer is not None:
        # Those of schedulers if the scheduler was, or if there is none here; else the others.
        if (optimizer or takes) and _both("an optimizer", shared["groups"], engine.optimizer):
            for group, values in zip(engine.optimizer.param_groups, shared["groups"], strict=True):
                for key, value in _taken(engine, group, values, optimizer, takes).items():
                    _put(group, key, value)
        if optimizer and shared["loss_scaler"] is not None:
            engine.optimizer.loss_scaler.load_state_dict(dict(shared["loss_scaler"]))
        engine.optimizer.forget_last_step()
    if training.randomness is not None and shared["randomness"] is not None:
        training.randomness.load_state_dict(shared["randomness"])
    if training.replicas is not None:
        training.replicas.resume(shared["own_buffers"])
    if training.alarms is not None and shared.get("alarms") is not None:  # older checkpoints have none
        training.alarms.load_state_dict(shared["alarms"])
    loader = _loader(engine)
    if _both("a data position (engine.training_dataloader)", shared["data"], loader):
        loader.load_state_dict(shared["data"])
    if own is not None:  # last: nothing shall draw between here and the next forward
        random_state.restore(own["random"], engine.device)


def check(engine: Any, shared: Mapping[str, Any], optimizer: bool, scheduler: bool, where: str) -> None:
    """Raise ValueError, on all ranks alike, with all of what `restore` would take from `where` that does not fit."""
    problems = []
    ours, theirs = engine.optimizer, shared["groups"]
    if (optimizer or scheduler) and ours is not None and theirs is not None and len(ours.param_groups) != len(theirs):
        problems.append(
            f"{where} has {counted(len(theirs), 'parameter group')}, the optimizer {len(ours.param_groups)}; give "
            "initialize() the same, or load with load_optimizer_states=False and load_lr_scheduler_states=False"
        )
    saved, here = shared["scheduler"], engine.lr_scheduler
    if scheduler and saved is not None and here is not None and saved["kind"] != type(here).__name__:
        problems.append(
            f"{where} has a learning-rate scheduler {saved['kind']}, this run {type(here).__name__}; use the "
            "same, or load with load_lr_scheduler_states=False"
        )
    elif scheduler and saved is not None and saved["state"] is not None and hasattr(here, "state_dict"):
        problems += [f"{where}: the scheduler's {each}" for each in _unlike(saved["state"], here.state_dict(), "state")]
    if not problems and ours is not None and theirs is not None:
        problems += [f"{where}: {each}" for each in _unfit(engine, theirs, optimizer, scheduler)]
    if problems:
        raise ValueError("; ".join(problems))


def _unlike(saved: Any, here: Any, what: str) -> Iterator[str]:
    """Where `saved` has something else for numbers, or lists of them, than the state of the object here."""
    if isinstance(here, Mapping) and isinstance(saved, Mapping):
        for key in here.keys() & saved.keys():
            yield from _unlike(saved[key], here[key], f"{what}[{key!r}]")
    elif isinstance(here, (list, tuple)) and isinstance(saved, (list, tuple)):
        if what.endswith("['base_lrs']") and len(here) != len(saved):
            yield f"{what} has {len(saved)} rates there and {len(here)} here"
        for at, (one, other) in enumerate(zip(saved, here, strict=False)):
            yield from _unlike(one, other, f"{what}[{at}]")
    elif here is not None and (isinstance(here, (list, tuple, Mapping)) or _is_number(here) != _is_number(saved)):
        yield f"{what} is {str(saved)[:80]!r} there and {str(here)[:80]!r} here"


def _is_number(value: Any) -> bool:
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    return one or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _unfit(engine: Any, saved: Any, optimizer: bool, scheduler: bool) -> Iterator[str]:
    """Which parameter groups no step could use with what would be put into them."""
    units = {unit.plan.group: unit for unit in engine._sharded.trained}
    for number, (group, values) in enumerate(zip(engine.optimizer.param_groups, saved, strict=True)):
        if number in units and (optimizer or scheduler):
            try:
                if "lr" in group and "lr" not in values:
                    raise ValueError("it has no lr")
                mixed = {**group, **_taken(engine, group, values, optimizer, scheduler)}
                engine.optimizer.states.keys(units[number], mixed)
            except Exception as error:  # of torch's and others' classes, too
                yield f"parameter group {number} is of no use: {type(error).__name__}: {error}"


def _both(what: str, saved: Any, here: Any) -> bool:
    """Whether both sides have something; a warning if one has."""
    if (saved is None) != (here is None):
        have, lacks = ("this run", "the checkpoint") if saved is None else ("the checkpoint", "this run")
        rank_zero(logging.WARNING, "%s has %s, %s has none: not loaded", have, what, lacks)
    return saved is not None and here is not None


def _loader(engine: Any) -> Loader | None:
    """The loader whose position is ours to keep."""
    loader: Any = engine.training_dataloader
    while isinstance(loader, RepeatingLoader):
        loader = loader.loader
    return loader if isinstance(loader, Loader) else None


def _of_scheduler(scheduler: Any) -> dict[str, Any]:
    name, state = type(scheduler).__name__, None
    if hasattr(scheduler, "state_dict"):
        state = scheduler.state_dict()
        state = _without_functions(state) if isinstance(scheduler, LRScheduler) else state
    else:
        rank_zero(logging.WARNING, "the scheduler %s has no state_dict(): it is not in the checkpoint", name)
    return {"kind": name, "state": state}


def _without_functions(state: Any) -> Any:
    """A state of torch's schedulers without functions, which the new scheduler has by its construction."""
    if type(state) is dict:
        return {key: _without_functions(item) for key, item in state.items() if not isinstance(item, _FUNCTIONS)}
    return [_without_functions(item) for item in state] if type(state) is list else state


def _load_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> bool:
    """Whether the scheduler has a state to go on from; a warning if not."""
    name = type(scheduler).__name__
    if saved["state"] is None or not hasattr(scheduler, "load_state_dict"):
        rank_zero(logging.WARNING, "the scheduler %s has no state_dict() and load_state_dict(): it begins anew", name)
        return False
    try:
        scheduler.load_state_dict(copy.deepcopy(saved["state"]))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(
            f"the state of the learning-rate scheduler {name} does not fit: {type(error).__name__}: {error}"
        ) from error
    return True


def _of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_STATE}


def _taken(
    engine: Any, group: Mapping[str, Any], values: Mapping[str, Any], optimizer: bool, scheduler: bool
) -> dict[str, Any]:
    """What of the saved hyperparameters of a group is put into it."""
    keeps = engine.lr_scheduler is not None and not scheduler
    scheduled = set(_scheduled(engine.lr_scheduler, group))
    if scheduler:
        scheduled |= set(_scheduled(engine.lr_scheduler, values))
    return {key: value for key, value in values.items() if (not keeps if key in scheduled else optimizer)}


def _scheduled(scheduler: Any, group: Mapping[str, Any]) -> Iterator[str]:
    """Keys of a group that are a scheduler's."""
    yield from _SCHEDULED
    if "max_momentum" in group or getattr(scheduler, "cycle_momentum", False):
        yield from _MOMENTUM


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    """Write a hyperparameter; a tensor is filled, since a captured graph or a scheduler may hold it."""
    before = group.get(key)
    if isinstance(before, torch.Tensor):
        with torch.no_grad():
            before.copy_(torch.as_tensor(value))
    elif isinstance(value, torch.Tensor):
        group[key] = value.item() if key in group and value.numel() == 1 else value.clone()
    else:
        group[key] = copy.deepcopy(value)
