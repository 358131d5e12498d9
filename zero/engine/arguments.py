"""The arguments of `initialize`: a configuration or a command line with it, parameters, an optimizer, a scheduler."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn

from zero.config import Config
from zero.optim.lr import build_scheduler

Groups = list[dict[str, Any]]


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
    sources = {name: source for name, source in sources.items() if source is not None}
    if not sources:
        raise ValueError(
            "initialize() needs a configuration: pass config=<path or dict>, "
            "or args with zero_config (see zero.add_config_arguments)"
        )
    if len(sources) > 1:
        raise ValueError(f"initialize() got more than one configuration: {', '.join(sources)}; pass one of them")
    return next(iter(sources.values()))


def parameter_groups(model: nn.Module, model_parameters: Iterable[Any] | None) -> Groups:
    """Parameter groups as new dicts, without parameters that need no gradient; raises ValueError if none is left."""
    items = list(model.parameters() if model_parameters is None else model_parameters)
    if not all(isinstance(item, dict) for item in items):
        items = [{"params": items}]
    names = {param: name for name, param in model.named_parameters()}
    groups, seen = [], {}
    for index, item in enumerate(items):
        params = item["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        for param in params:
            if not isinstance(param, torch.Tensor):
                raise ValueError(f"model_parameters: group {index} holds a {type(param).__name__}; wanted parameters")
        kept = [param for param in dict.fromkeys(params) if param.requires_grad]
        for param in kept:
            if seen.setdefault(param, index) != index:
                name = names.get(param, f"of shape {tuple(param.shape)}")
                raise ValueError(f"model_parameters: parameter '{name}' is in groups {seen[param]} and {index}")
        if kept:
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
        if section is None or section.type is None or optimizer is None:
            return None
        return build_scheduler(optimizer, section.type, dict(section.params or {}))
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
