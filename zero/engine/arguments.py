"""The arguments of `initialize`: a configuration or a command line with it, parameters, an optimizer, a scheduler.

And what of them all ranks must have in common.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn

from zero.config import Config
from zero.config.errors import show
from zero.config.override import override
from zero.config.read import read
from zero.config.unavailable import lookup
from zero.core.init.deferred_param import DeferredParam
from zero.core.owner import axes_of, cut_of, owner_of
from zero.launch.contract import CONFIG, SETS
from zero.log import log_once
from zero.optim.lr import build_scheduler
from zero.plan.grid import UnitAxes

Groups = list[dict[str, Any]]

# What decides over numbers and messages. The rest may differ: who logs, where a drive is mounted.
_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("zero_optimization", "zero", "fp16", "bf16", "data_types", "torch_autocast", "communication_data_type"),
    *("optimizer", "gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
    "activation_checkpointing",
)
_OWN = ("nvme_path", "pin_memory", "profile", "report")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--zero_config FILE`, and DeepSpeed's spelling of it, to a script's parser; returns the parser."""
    group = parser.add_argument_group("zero")
    group.add_argument("--zero_config", type=str, default=None, help="the engine's JSON")
    group.add_argument("--deepspeed_config", type=str, default=None, help="the same, as DeepSpeed spells it")
    group.add_argument("--deepspeed", action="store_true", help="accepted for scripts written for DeepSpeed; no effect")
    return parser


def resolve_config(
    args: Any,
    config: str | PathLike | Mapping[str, Any] | None,
    config_params: str | PathLike | Mapping[str, Any] | None,
) -> str | PathLike | Mapping[str, Any]:
    """The one configuration among `config`, its alias `config_params`, and the script's arguments.

    Raises ValueError when there is none or more than one.
    """
    sources = {
        "config": config,
        "config_params": config_params,
        "args.zero_config": getattr(args, "zero_config", None),
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    name, source = only_one("initialize()", **sources)
    file, sets = _flags()
    if source is not None and (file or sets):
        flags = " ".join([f"--config {file}"] * (file is not None) + [f"--set {text}" for text in sets])
        log_once(logging.WARNING, f"the configuration is {name} of initialize(), and not {flags} of zero run")
    source = launched_config() if source is None else source
    if source is None:
        raise ValueError(
            "initialize() needs a configuration: pass config=<path or dict>, "
            "or args with zero_config (see zero.add_config_arguments), or start with `zero run --config FILE`"
        )
    return source


def _flags() -> tuple[str | None, list[str]]:
    return os.environ.get(CONFIG), json.loads(os.environ.get(SETS, "[]"))


def launched_config() -> str | dict[str, Any] | None:
    """The configuration of `zero run --config FILE --set KEY=VALUE`; None where it got neither."""
    file, sets = _flags()
    return _with_sets(file, sets) if sets else file


def _with_sets(file: str | None, sets: list[str]) -> dict[str, Any]:
    """The values of a file with those of --set in place of its own, which are named."""
    values = read(file).values if file is not None else {}
    for text in sets:
        before = copy.deepcopy(values)
        path = override(values, text)
        old, new = lookup(before, path), lookup(values, path)
        over = f", and not {show(old)} as in {file}" if old not in (None, new) else ""
        log_once(logging.INFO, f"{path} is {show(new)} by --set of zero run{over}")
    return values


_KINDS = {"model": nn.Module, "optimizer": torch.optim.Optimizer, "configuration": (Mapping, str, PathLike)}


def check_places(args: Any, model: Any, optimizer: Any, model_parameters: Any, configured: bool) -> None:
    """Raise ValueError for arguments of `initialize` that stand in each other's places, and where there is no model.

    configured: there is a `config`; then a mapping in `args` is none, scripts give their arguments so.
    """
    taken = {
        "`args`, the first argument, is the script's parsed command line": (args, ("configuration",) * configured),
        "`model` is a torch.nn.Module": (model, ("model",)),
        "`optimizer` is an optimizer or a callable": (optimizer, ("optimizer", "configuration")),
        "`model_parameters` is model.parameters() or parameter groups": (model_parameters, ()),
    }
    for what, (value, kinds) in taken.items():
        found = next((kind for kind, types in _KINDS.items() if isinstance(value, types)), None)
        if found is not None and found not in kinds:
            raise ValueError(
                f"initialize(): {what}, and got a {type(value).__name__}, which is the {found}; name the arguments, "
                "as in initialize(model=model, config=config)"
            )
    if not isinstance(model, nn.Module):
        raise ValueError(f"initialize() needs model=<torch.nn.Module>; got {type(model).__name__}")


def only_one(caller: str, **arguments: Any) -> tuple[str, Any]:
    """Name and value of the one that is not None, ("", None) where all are; ValueError for more than one."""
    present = [(name, value) for name, value in arguments.items() if value is not None]
    if len(present) > 1:
        names = " and ".join(name for name, _ in present)
        raise ValueError(f"{caller} got {names}, which say the same; pass one of them")
    return present[0] if present else ("", None)


def parameter_groups(
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
    stages: bool = False,
) -> Groups:
    """Parameter groups as new dicts, without parameters that need no gradient; raises ValueError if none is left.

    As torch's optimizers take them: parameters, pairs of a name and a parameter, or groups of either. stages: other
    ranks may have what this one has not, so that groups without parameters stay.
    """
    items = list(model.parameters() if model_parameters is None else model_parameters)
    if not (items and all(isinstance(item, dict) for item in items)):
        items = [{"params": items}]
    names = {param: name for name, param in model.named_parameters()}
    groups, seen = [], {}
    for index, item in enumerate(items):
        params = item["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        params = [each[1] if isinstance(each, tuple) and len(each) == 2 else each for each in params]
        for param in params:
            if not isinstance(param, torch.Tensor):
                raise ValueError(f"model_parameters: group {index} holds a {type(param).__name__}; wanted parameters")
        kept = [param for param in dict.fromkeys(params) if param.requires_grad]
        for param in kept:
            if seen.setdefault(param, index) != index:
                name = names.get(param, f"of shape {tuple(param.shape)}")
                raise ValueError(f"model_parameters: parameter '{name}' is in groups {seen[param]} and {index}")
        if kept or stages:
            groups.append({**item, "params": kept})
    if not groups:
        raise ValueError("model_parameters: no parameter requires a gradient, so there is nothing to optimize")
    return groups


def client_optimizer(client: Any, groups: Groups) -> torch.optim.Optimizer:
    """The script's optimizer: the object itself, or what the callable makes of the parameters."""
    if isinstance(client, torch.optim.Optimizer):
        return client
    if not callable(client):
        raise ValueError(f"initialize(optimizer=...): got a {type(client).__name__}; wanted an optimizer or a callable")
    # `groups` are copies; whether the user thinks in groups shows in what other keys they have.
    in_groups = any(group.keys() != {"params"} for group in groups)
    optimizer = client(groups if in_groups else [param for group in groups for param in group["params"]])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"initialize(optimizer=...): the callable made a {type(optimizer).__name__}; wanted an optimizer"
        )
    return optimizer


def make_scheduler(scheduler: Any, optimizer: Any, settings: Config) -> Any:
    """The script's scheduler, or what its callable makes of `optimizer`; without one the JSON's, or None.

    Raises ValueError for a scheduler of another optimizer.
    """
    if scheduler is None:
        section = settings.scheduler
        if section is None or optimizer is None:
            return None
        return build_scheduler(optimizer, section.type, dict(section.params))
    if callable(scheduler):
        return scheduler(optimizer)
    kind = type(scheduler).__name__
    bound = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    ours = optimizer.param_groups if optimizer is not None else []
    if bound is not None and not any(group is own for group in bound for own in ours):
        raise ValueError(
            f"initialize(lr_scheduler=...): {kind} is bound to an optimizer that is not the one that trains, so it "
            "would change nothing; give that optimizer too, or a callable of the optimizer"
        )
    if not hasattr(scheduler, "step"):
        raise ValueError(
            f"initialize(lr_scheduler=...): got a {kind}; wanted a scheduler, which has step(), or a callable of the "
            "optimizer"
        )
    return scheduler


def described_config(settings: Config) -> list[str]:
    """Lines to be compared between ranks, one per key of the configuration."""
    values = settings.model_dump(include=set(_KEYS))
    return [line for key in _KEYS if key in values for line in _flat(key, values[key])]


def described_parameters(model: nn.Module, groups: Groups) -> dict[UnitAxes, list[str]]:
    """Lines to be compared between the ranks that share parameters, one for each of these in order, by their axes."""
    group_of = {id(param): index for index, group in enumerate(groups) for param in group["params"]}
    lines: dict[UnitAxes, list[str]] = {}
    for name, param in model.named_parameters():
        trained = f"group {group_of[id(param)]}" if id(param) in group_of else "no group"
        shape, dtype, cut = tuple(param.shape), str(param.dtype).removeprefix("torch."), cut_of(param)
        part = "" if cut is None else f", of {cut.shape} {cut.boxes}"
        lines.setdefault(axes_of(param), []).append(
            f"parameter '{name}' {shape} {dtype}{part}, requires_grad={param.requires_grad}, {trained}{_whose(param)}"
        )
    return lines


def _whose(param: nn.Parameter) -> str:
    """Whether an engine still has it; or had it, and has left it cut, so that all ranks must gather it."""
    owner = owner_of(param)
    if owner is None or isinstance(owner.unit, DeferredParam):
        return ""
    if owner.unit.left_by is None:
        return ", of an engine that is still there"
    return ", of an engine that was dropped" if owner.unit.resharded else ""


def _flat(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _OWN:
                yield from _flat(f"{path}.{key}", inner)
    else:
        yield f"{path} = {value}"
