"""A rule out of an optimizer that the user made."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from zero.log import rank_zero
from zero.optim.fused import NOT_ELEMENTWISE, ShardOptimizer, TorchShardOptimizer


def client_rule(client: torch.optim.Optimizer, untested: bool) -> ShardOptimizer:
    """Run the class of `client` on shards, one instance per unit, with the arguments that `client` was made with.

    `untested` allows classes that torch does not have; that such a class works element by element nobody checks.
    Raises ValueError, by name and with the reason, for one that cannot run so.
    """
    kind = type(client)
    for base in kind.__mro__:
        if base.__name__ in NOT_ELEMENTWISE:
            raise ValueError(f"optimizer: {kind.__name__} cannot run on shards: {NOT_ELEMENTWISE[base.__name__]}")
    if getattr(torch.optim, kind.__name__, None) is not kind and not untested:
        raise ValueError(
            f"optimizer: {kind.__name__} is none of torch.optim; if each element of its update depends on that "
            "element of parameter, gradient and state only, set zero_allow_untested_optimizer to true"
        )
    if _has_stepped(client):
        rank_zero(logging.WARNING, "optimizer: %s has taken steps; its state is not taken over", kind.__name__)
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
    found, lost = {}, []
    for each in parameters:
        if each.name in client.defaults:
            found[each.name] = client.defaults[each.name]
        elif hasattr(client, each.name):
            found[each.name] = getattr(client, each.name)
        else:
            lost.append(each.name)
    if lost:
        raise ValueError(
            f"optimizer: {kind.__name__} keeps {lost} of its constructor neither in `defaults` nor as attributes, "
            "so it cannot be made anew for each unit; let it do one of the two"
        )
    return found


def _has_stepped(client: torch.optim.Optimizer) -> bool:
    for state in client.state.values():
        step = state.get("step")
        if "step" not in state or (step.item() if isinstance(step, torch.Tensor) else step):
            return True
    return False
