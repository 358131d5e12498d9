"""Parameters of an engine stay what they were: `to`, `cpu`, `half` and the like, and a check before each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zero.core.init.deferred_param import DeferredParam
from zero.core.owner import is_released, owner_of
from zero.core.unit import Unit

_NAME = "_apply"  # what all of them call, on each module below too


class Conversion:
    """Stands in a module's `_apply`; what pickles the module gets the ordinary one."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Convert what is plain as torch does, and shards of `zero.Init`, which stay where they lie.

        RuntimeError, before anything is changed, where `fn` would change a parameter of an engine, or one that is
        gathered.
        """
        module = self._module
        ours = {param: _dtype_after(param, fn) for param in module.parameters(recurse) if _is_ours(param)}
        if not ours:
            return type(module)._apply(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        every, plain = module._parameters, {}
        for name, param in every.items():
            if param not in ours:
                plain[name] = param
            elif not is_released(param):
                fn(param)  # such as share_memory_, which changes no values
            elif param.dtype != ours[param]:
                owner_of(param).unit.convert(ours[param])
        module._parameters = plain
        try:
            nn.Module._apply(module, fn, recurse=False)
        finally:
            every.update(plain)
            module._parameters = every
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        """The same for the copy of the module, whose parameters may be cut as well."""
        return Conversion(copy.deepcopy(self._module, memo))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """The stand-in for saved files."""
        return getattr, (self._module, _NAME)


def _is_ours(param: nn.Parameter) -> bool:
    """Whether an engine has its values, or `zero.Init`, but for one that is open in a block, which is a plain one."""
    owner = owner_of(param)
    return owner is not None and not (isinstance(owner.unit, DeferredParam) and owner.unit.opened)


def _dtype_after(param: nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.dtype:
    """The dtype that `fn` gives the parameter, its own where that is an engine's or gathered; else RuntimeError."""
    before = torch.empty((2,) * param.ndim, dtype=param.dtype, device=param.device)
    after, owner = fn(before), owner_of(param)
    if after is before or (isinstance(owner.unit, DeferredParam) and is_released(param)):
        return after.dtype
    raise RuntimeError(
        f"parameter '{owner.name}': the engine keeps parameters as {before.dtype} on {before.device}, in memory of its "
        f"own; asked for {after.dtype} on {after.device}. bf16 and fp16 are sections of the JSON; convert the model "
        "before initialize() and outside of zero.GatheredParameters(...), or a copy that was made inside"
    )


def guard(modules: Iterable[nn.Module]) -> None:
    """Have each of these modules that has parameters answer so, until `unguard`."""
    for module in modules:
        if next(module.parameters(), None) is not None:
            vars(module)[_NAME] = Conversion(module)


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
    if unit.resharded:
        return  # released ones refuse every change themselves
    for spec, param, view in zip(unit.plan.params, unit.params, unit.buffer.views, strict=True):
        if param.dtype != view.dtype or param.device != view.device or param.shape != view.shape:
            raise RuntimeError(
                f"parameter '{spec.name}' of {unit.buffer.name} was {view.dtype} {tuple(view.shape)} on "
                f"{view.device} and is now {param.dtype} {tuple(param.shape)} on {param.device}; move, convert and "
                "resize a model before initialize(), which then decides"
            )
