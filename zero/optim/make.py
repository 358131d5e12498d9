"""Makes the shard optimizer that the configuration names, or that runs the class of the user's optimizer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero.config.check import optimizer_problems
from zero.config.instead import did_you_mean
from zero.config.optimizers import ARGUMENTS, MuonParams, torch_reason
from zero.log import rank_zero
from zero.optim.fused import FusedOptimizer, FusedShardOptimizer
from zero.optim.lamb import LambShardOptimizer
from zero.optim.matrix import MatrixShardOptimizer
from zero.optim.shard_optimizer import ShardOptimizer
from zero.optim.torch_optimizer import TorchShardOptimizer

# These need whole matrices or the whole model, not a shard.
NOT_ELEMENTWISE = {
    "Adafactor": "it factors the second moment over rows and columns of whole matrices",
    "LBFGS": "it needs a closure and inner products over the whole model",
    "Muon": "it orthogonalizes whole matrices, which runs here as torch's own class has it and not as one made of it",
    "SparseAdam": "it needs sparse gradients, and gradients here are dense",
}
# DeepSpeed's optimizers that torch lacks, by their names in lower case.
_COMPRESSED = "it sends messages of its own, and gradients are reduced before the optimizer sees them"
_MUP = "it needs the widths of a model that mup has made, so hand mup's object to initialize(optimizer=...)"
_OF_DEEPSPEED = {
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), _COMPRESSED),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), _MUP),
}
_CHECKED_BEFORE = ("max_grad_norm", "zero")  # arguments that rules of the config check


def optimizer_type_problems(kind: str, params: Mapping[str, Any]) -> list[str]:
    """Errors in type and arguments of the JSON section `optimizer` that only torch knows."""
    if kind.lower() in ARGUMENTS:
        return []
    refused = {name.lower(): why for name, why in NOT_ELEMENTWISE.items()} | _OF_DEEPSPEED
    if why := refused.get(kind.lower()):
        use = "use an element-wise optimizer such as AdamW, Adagrad, SGD or RMSprop"
        return [f"optimizer.type: '{kind}' cannot run on shards: {why}; {use}"]
    classes = torch_classes()
    if kind not in classes:
        ours = ("Adam", "AdamW", "Lamb", "Lion", "Muon")
        names = dict.fromkeys([*ours, *sorted(classes.keys() - NOT_ELEMENTWISE.keys())])
        return [f"optimizer.type: unknown optimizer '{kind}'{did_you_mean(kind, names)} Known: {', '.join(names)}"]
    names = list(inspect.signature(classes[kind]).parameters)[1:]  # the first are the parameters
    params = {key: value for key, value in params.items() if key not in _CHECKED_BEFORE}
    unknown = [
        f"optimizer.params: torch.optim.{kind} has no argument '{key}'{did_you_mean(key, names)} "
        f"It has: {', '.join(names)}"
        for key in params
        if key not in names
    ]
    try:
        TorchShardOptimizer(classes[kind], {key: value for key, value in params.items() if key in names})
    except (TypeError, ValueError) as error:
        unknown.append(f"optimizer.params: torch.optim.{kind} refuses {params}: {error}")
    return unknown


def make_shard_optimizer(
    kind: str, params: dict[str, Any], compute_dtype: str, groups: Sequence[Mapping[str, Any]] = ()
) -> ShardOptimizer:
    """The optimizer of `optimizer.type` and `optimizer.params` in the JSON; raises ValueError by JSON path.

    `groups`: all parameter groups, for Muon as `muon_groups` returns them.
    """
    if kind.lower() == "muon":
        return MatrixShardOptimizer(MuonParams.model_validate(params), compute_dtype, groups)
    reason = torch_reason(kind, params)
    if reason is None:
        arguments = ARGUMENTS[kind.lower()].model_validate(params)
        made = LambShardOptimizer if kind.lower() == "lamb" else FusedShardOptimizer
        return made(kind.lower(), arguments, compute_dtype)
    if kind.lower() in ARGUMENTS:
        rank_zero(logging.INFO, "optimizer %s runs as torch's own class, because %s", kind, reason)
        kind, params = torch_arguments(kind.lower(), params)
    elif lines := optimizer_type_problems(kind, params):
        raise ValueError("\n".join(lines))
    try:
        return TorchShardOptimizer(torch_classes()[kind], params)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer.params: torch.optim.{kind} refuses {params}: {error}") from error


def shard_optimizer_of(client: torch.optim.Optimizer, untested: bool, compute_dtype: str) -> ShardOptimizer:
    """Run the class of `client` on shards, one instance per unit, with the arguments that `client` was made with.

    A `FusedOptimizer` gives the kernels that it names. `untested` allows classes that are not torch's, without a check
    that they work element by element. Raises ValueError, with name and reason, for a class that cannot run.
    """
    if isinstance(client, FusedOptimizer):
        at = (type(client).__name__,)
        if lines := optimizer_problems(client.kind, client.arguments, compute_dtype == "bf16", at):
            raise ValueError("\n".join(lines))
        return make_shard_optimizer(client.kind, client.arguments, compute_dtype)
    kind = type(client)
    if kind is torch.optim.Muon:
        _warn_of_steps(client)
        for group in client.param_groups:
            group["use_muon"] = True  # all of the group, wherever in the model it is
        return MatrixShardOptimizer(MuonParams(ns_method="standard"), compute_dtype, client.param_groups)
    for base in kind.__mro__:
        if base.__name__ in NOT_ELEMENTWISE:
            raise ValueError(f"optimizer: {kind.__name__} cannot run on shards: {NOT_ELEMENTWISE[base.__name__]}")
    if getattr(torch.optim, kind.__name__, None) is not kind and not untested:
        raise ValueError(
            f"optimizer: {kind.__name__} is none of torch.optim; if each element of its update depends on that "
            "element of parameter, gradient and state only, set zero_allow_untested_optimizer to true"
        )
    _warn_of_steps(client)
    arguments = _arguments(client)
    try:
        return TorchShardOptimizer(kind, arguments)
    except Exception as error:
        raise ValueError(
            f"optimizer: {kind.__name__} cannot be made anew for each unit as "
            f"{kind.__name__}(params, **{arguments}): {type(error).__name__}: {error}"
        ) from error


def _arguments(client: torch.optim.Optimizer) -> dict[str, Any]:
    """The arguments of the constructor, from `defaults` or the attribute of the same name."""
    kind = type(client)
    parameters = list(inspect.signature(kind).parameters.values())[1:]  # the first are the parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(client.defaults)
    missing = [each.name for each in parameters if each.name not in client.defaults and not hasattr(client, each.name)]
    if missing:
        raise ValueError(
            f"optimizer: {kind.__name__} keeps {missing} of its constructor neither in `defaults` nor as attributes, "
            "so it cannot be made anew for each unit; let it do one of the two"
        )
    names = [each.name for each in parameters]
    return {name: client.defaults[name] if name in client.defaults else getattr(client, name) for name in names}


def _warn_of_steps(client: torch.optim.Optimizer) -> None:
    for state in client.state.values():
        step = state.get("step")
        if "step" not in state or (step.item() if isinstance(step, torch.Tensor) else step):
            name = type(client).__name__
            rank_zero(logging.WARNING, "optimizer: %s has taken steps; its state is not taken over", name)
            return


def torch_arguments(kind: str, params: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of torch's class for one of ours, without arguments that only ours has."""
    names = {"adam": "Adam", "adamw": "AdamW", "lion": "Lion", "sgd": "SGD", "adagrad": "Adagrad"}
    name = "AdamW" if kind == "adam" and params.get("adam_w_mode", True) else names[kind]
    ours = ("torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states", "zero")
    return name, {key: value for key, value in params.items() if key not in ours}


def torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer of torch by name."""
    base = torch.optim.Optimizer
    classes = inspect.getmembers(torch.optim, inspect.isclass)
    return {name: value for name, value in classes if issubclass(value, base) and value is not base}
