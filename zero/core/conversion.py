"""Parameters of an engine stay what they were: `to`, `cpu`, `half` and the like, and a check before each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero.core.owner import is_released, owner_of
from zero.core.unit import Unit

_NAME = "_apply"  # what all of them call, on each module below too


class Conversion:
    """Stands in a module's `_apply`; the copy of a module that it comes along with gets the ordinary one."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Convert buffers; RuntimeError, before anything is changed, where `fn` would change a parameter."""
        module = self._module
        kept = [param for param in module.parameters(recurse) if owner_of(param) is not None]
        if not kept:
            return type(module)._apply(module, fn, recurse)
        for param in kept:
            before = torch.empty((2,) * param.ndim, dtype=param.dtype, device=param.device)
            after = fn(before)
            if after is not before:
                raise RuntimeError(
                    f"parameter '{owner_of(param).name}': the engine keeps parameters as {before.dtype} on "
                    f"{before.device}, in memory of its own; asked for {after.dtype} on {after.device}. bf16 and fp16 "
                    "are sections of the JSON; convert the model before initialize(), or a copy that was made inside "
                    "zero.GatheredParameters(...)"
                )
        for child in module.modules() if recurse else [module]:
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[name] = fn(buffer)
        for param in kept:
            if not is_released(param):
                fn(param)  # such as share_memory_, which changes no values
        return module

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """What copies and saved files get instead."""
        return getattr, (self._module, _NAME)


def guard(module: nn.Module) -> None:
    """Have every module with parameters answer so, until `unguard`."""
    for child in module.modules():
        if next(child.parameters(), None) is not None:
            vars(child)[_NAME] = Conversion(child)


def unguard(module: nn.Module) -> None:
    """Undo `guard`."""
    for child in module.modules():
        if isinstance(vars(child).get(_NAME), Conversion):
            del vars(child)[_NAME]


def check_parameters(unit: Unit) -> None:
    """Raise RuntimeError, naming the parameter, where one has another shape, dtype, device or requires_grad.

    So too where one that is trained has a gradient of its own: ours are taken from there as they land.
    """
    for spec, param, trained in zip(unit.plan.params, unit.params, unit.buffer.required_grad, strict=True):
        if unit.shard.master is not None and param.grad is not None:
            raise RuntimeError(
                f"parameter '{spec.name}' of {unit.buffer.name}: its .grad was assigned, and no step would use it; "
                "call zero.utils.safe_set_full_grad(param, value) between backward() and step() on all ranks, or "
                "set .grad to None"
            )
        if param.requires_grad != trained:
            # Thawed, it would silently not be trained; frozen, weight decay and momentum would still move it.
            raise RuntimeError(
                f"parameter '{spec.name}' of {unit.buffer.name}: requires_grad was {trained} at initialize() and "
                f"is now {param.requires_grad}; set it before initialize(). To train it in some steps only, give "
                "it a parameter group of its own, whose lr is 0 in the others"
            )
    if unit.cut:
        return  # released ones refuse every change themselves
    for spec, param, view in zip(unit.plan.params, unit.params, unit.buffer.views, strict=True):
        if param.dtype != view.dtype or param.device != view.device or param.shape != view.shape:
            raise RuntimeError(
                f"parameter '{spec.name}' of {unit.buffer.name} was {view.dtype} {tuple(view.shape)} on "
                f"{view.device} and is now {param.dtype} {tuple(param.shape)} on {param.device}; move, convert and "
                "resize a model before initialize(), which then decides"
            )
