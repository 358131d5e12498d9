"""Which stage each module of a model belongs to: as the model or the JSON says, or divided evenly."""

from __future__ import annotations

import contextlib
import re
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero.plan.pipeline import balanced

# What a layer weighs at least, of all parameters: layers without any are divided evenly, too.
_LEAST = 1e-9


def divide(
    model: nn.Module,
    stages: int,
    partition: str | Sequence[int],
    stage_map: Mapping[str, int],
    call: Callable[[], Any] | None = None,
) -> dict[str, int]:
    """The stage of each module that lies in one, by name; of other modules' parameters, each by itself.

    stage_map: stages of modules or parameters by name; what is not named is of the stage of what is registered before
    it. So `module.pipeline_stage = n`, where it is empty. Without both, the layers (children of an nn.Sequential, or
    blocks of the largest nn.ModuleList; what is registered before these is of the first stage, and behind them of the
    last) are divided as `partition` says: see the section `pipeline`. call: runs the model on a batch, for "time";
    collective then. ValueError for what does not fit.
    """
    marked = {name: each.pipeline_stage for name, each in model.named_modules() if hasattr(each, "pipeline_stage")}
    if explicit := dict(stage_map) or marked:
        source = "pipeline.stage_map" if stage_map else "pipeline_stage"
        _check(explicit, model, stages, source)
        return dict(_assigned(model, explicit, "", [0]))
    names = layers(model)
    if len(names) < stages:
        raise ValueError(
            f"pipeline: {type(model).__name__} has {len(names)} layers, and there are {stages} stages; each wants one. "
            "Take fewer stages, or say by pipeline.stage_map which module is of which"
        )
    modules = [model.get_submodule(name) for name in names]
    kinds = [type(each).__name__ for each in modules]
    starts = starts_of(kinds, lambda: _numels(model, names), stages, partition, lambda: times_of(modules, model, call))
    return dict(_assigned(model, {name: bisect(starts, at) - 1 for at, name in enumerate(names)}, "", [0]))


def layers(model: nn.Module) -> list[str]:
    """The names of what is divided evenly, in order."""
    if isinstance(model, nn.Sequential):
        return [name for name, _ in model.named_children()]
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each)]
    if lists:
        trunk, blocks = max(lists, key=lambda item: sum(param.numel() for param in item[1].parameters()))
        return [f"{trunk}.{at}" if trunk else at for at, _ in blocks.named_children()]
    found = []
    for name, child in model.named_children():
        parts = [f"{name}.{at}" for at, _ in child.named_children()] if isinstance(child, nn.Sequential) else []
        found += parts or [name]
    return found


def starts_of(
    kinds: Sequence[str],
    numels: Callable[[], list[float]],
    stages: int,
    partition: str | Sequence[int],
    times: Callable[[], list[float]],
) -> list[int]:
    """Where each stage begins among layers of these classes; `numels`, `times`: parameters and seconds of each."""
    if not isinstance(partition, str):
        if len(partition) != stages or sum(partition) != len(kinds) or min(partition) < 1:
            raise ValueError(
                f"pipeline.partition: got {list(partition)}; wanted {stages} numbers of layers, one for each stage, "
                f"that make up {len(kinds)}"
            )
        return [sum(partition[:stage]) for stage in range(stages)]
    if partition.lower() == "uniform":
        weights = [1.0] * len(kinds)
    elif partition.lower() == "time":
        weights = times()
    elif partition.lower().startswith("type:"):
        kind = re.compile(partition[len("type:") :], re.IGNORECASE)
        weights = [float(bool(kind.search(each))) for each in kinds]
        if sum(weights) < stages:
            raise ValueError(
                f"pipeline.partition: '{partition}' finds {int(sum(weights))} layers, and there are {stages} stages"
            )
    elif partition.lower() in ("parameters", "best"):
        weights = numels()
    else:
        raise ValueError(f"partition: got {partition!r}; wanted 'parameters', 'uniform' or 'type:regex'")
    return balanced([weight + _LEAST * sum(weights) + _LEAST for weight in weights], stages)


def _numels(model: nn.Module, names: Sequence[str]) -> list[float]:
    """Parameters of each layer, with those before the first one and behind the others; each once in each."""
    held = [set() for _ in names]
    for name, at in _assigned(model, {name: at for at, name in enumerate(names)}, "", [0]):
        held[at].update(params_of(model, name))
    return [float(sum(param.numel() for param in each)) for each in held]


def times_of(modules: Sequence[nn.Module | None], model: nn.Module, call: Callable[[], Any] | None) -> list[float]:
    """Seconds of each in a forward on a batch, on rank 0: the second one, in eval mode; collective. None takes 0."""
    if call is None:
        raise ValueError(
            "pipeline.partition: 'time' runs the model on the first batch of training_data=, and initialize() has "
            "none; give it, or take 'parameters'"
        )
    times, started = [0.0] * len(modules), [0.0] * len(modules)

    def now() -> float:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()

    def begins(at: int, *_: Any) -> None:
        started[at] = now()

    def ends(at: int, *_: Any) -> None:
        times[at] = now() - started[at]

    there = [(at, each) for at, each in enumerate(modules) if each is not None]
    handles = [each.register_forward_pre_hook(partial(begins, at)) for at, each in there]
    handles += [each.register_forward_hook(partial(ends, at)) for at, each in there]
    try:
        with in_eval(model), torch.no_grad(), torch.random.fork_rng():
            for _ in range(2):
                call()
    finally:
        for handle in handles:
            handle.remove()
    found = [times]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


@contextlib.contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Inside, all modules are in eval mode; behind it, each is in its own."""
    training = [each for each in model.modules() if each.training]
    model.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True


def params_of(model: nn.Module, name: str) -> Iterator[nn.Parameter]:
    """The parameters of the module of this name, or the parameter itself; none where it is not here."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    if child in owner._modules:
        yield from owner._modules[child].parameters()
    elif owner._parameters.get(child) is not None:
        yield owner._parameters[child]


def _assigned(module: nn.Module, stage_map: Mapping[str, int], path: str, now: list[int]) -> Iterator[tuple[str, int]]:
    """Each module without others inside that have another stage; `now`: the stage of the last one."""
    for name, param in module._parameters.items():
        if param is not None:
            yield f"{path}{name}", stage_map.get(f"{path}{name}", now[0])
    before = -1
    for name, child in module._modules.items():
        here = f"{path}{name}"
        if child is None:
            continue
        now[0] = stage_map.get(here, now[0])
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and now[0] < before:
            raise ValueError(
                f"pipeline: '{here}' is said to be of stage {now[0]}, and what is before it of stage {before}; stages "
                "are run in order, so numbers must not decrease"
            )
        if any(each.startswith(f"{here}.") for each in stage_map):
            yield from _assigned(child, stage_map, f"{here}.", now)
        else:
            yield here, now[0]
        before = now[0]


def _check(stage_map: Mapping[str, int], model: nn.Module, stages: int, source: str) -> None:
    known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    for name, stage in stage_map.items():
        if name not in known:
            near = ", ".join(repr(each) for each, _ in model.named_children())
            raise ValueError(f"{source}: {type(model).__name__} has no module '{name}'; its children are {near}")
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < stages:
            raise ValueError(f"{source} of '{name}': got {stage!r}, wanted one of 0 to {stages - 1}")
