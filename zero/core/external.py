"""Parameters of one module that another one reads, told by hand.

A read inside a forward is noticed by itself; this is for code that reads past Python, as kernels do that take a
pointer, or that should find the parameters when the module begins.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zero.core.owner import owner_of

_PARAMETERS = "_zero_external"
_HANDLE = "_zero_external_handle"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather `parameter`, which belongs to another module, whenever `module` begins its forward.

    Before or after `zero.initialize`, in a constructor too; a second time for the same parameter does nothing. Raises
    TypeError for what is no module and RuntimeError for what is no parameter.
    """
    _check(module, parameter)
    known = module.__dict__.setdefault(_PARAMETERS, [])
    if not any(each is parameter for each in known):
        known.append(parameter)
    if _HANDLE not in module.__dict__:
        # The engine's own hook comes before it, so that the module is the one that reads.
        module.__dict__[_HANDLE] = module.register_forward_pre_hook(_ensure_gathered)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`. Raises RuntimeError for a parameter that was not registered there."""
    _check(module, parameter)
    known = module.__dict__.get(_PARAMETERS, [])
    rest = [each for each in known if each is not parameter]
    if len(rest) == len(known):
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is not registered as external to {type(module).__name__}"
        )
    module.__dict__[_PARAMETERS] = rest
    if not rest:
        module.__dict__.pop(_HANDLE).remove()


def _ensure_gathered(module: nn.Module, args: Any) -> None:
    for parameter in module.__dict__.get(_PARAMETERS, ()):
        owner = owner_of(parameter)
        if owner is not None:
            owner.unit.ensure_gathered()


def _check(module: nn.Module, parameter: nn.Parameter) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"a parameter is external to a module; got {type(module).__name__}, wanted an nn.Module")
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"only a parameter can be external; got {type(parameter).__name__}, wanted an nn.Parameter")
