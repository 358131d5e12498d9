"""From a parameter to who updates it, and whether what was asked for or given fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zero.core.owner import Owner, owner_of
from zero.optim.optimizer import ZeroOptimizer


class Managed(NamedTuple):
    """A trained parameter, the optimizer that updates it, and its parameter group of now."""

    owner: Owner
    optimizer: ZeroOptimizer

    @property
    def group(self) -> Mapping[str, Any]:
        """The hyperparameters."""
        return self.optimizer.param_groups[self.owner.unit.plan.group]

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.owner.param.shape


def managed(param: torch.Tensor) -> Managed | None:
    """None for a parameter that no engine manages or that is not trained."""
    owner = owner_of(param)
    optimizer = owner.unit.optimizer() if owner is not None else None
    return Managed(owner, optimizer) if optimizer is not None else None


def wanted(param: torch.Tensor, what: str) -> Managed:
    """As `managed`, but it must be one; raises ValueError, on all ranks as they know the same of it."""
    found = managed(param)
    if found is None:
        owner = owner_of(param)
        name = f"'{owner.name}' (frozen)" if owner is not None else f"of shape {tuple(param.shape)}"
        raise ValueError(f"{what}: parameter {name} is trained by no engine, so there is nothing to set")
    return found


def misfit(what: str, value: Any, shape: tuple[int, ...], name: str) -> ValueError | None:
    """The error for a value that is not a tensor of numbers of this shape, or None."""
    wanted_text = f"wanted a floating-point tensor of shape {tuple(shape)} for parameter '{name}'"
    if not isinstance(value, torch.Tensor):
        return ValueError(f"{what}: got a {type(value).__name__}; {wanted_text}")
    if tuple(value.shape) != tuple(shape) or not value.is_floating_point():
        return ValueError(f"{what}: got shape {tuple(value.shape)}, {value.dtype}; {wanted_text}")
    return None


def unknown_key(what: str, found: Managed, key: str) -> ValueError | None:
    """The error for a state that the optimizer does not have, or None."""
    wide, numbers = found.optimizer.rule.keys(found.owner.unit, found.group)
    if key in wide or key in numbers:
        return None
    known = ", ".join((*wide, *numbers)) or "none"
    return ValueError(f"{what}: unknown key {key!r} for parameter '{found.owner.name}'; known: {known}")


def is_number(found: Managed, key: str) -> bool:
    """Whether `key` is one number for the whole unit."""
    return key in found.optimizer.rule.keys(found.owner.unit, found.group)[1]


def unfit_number(what: str, key: str, value: Any) -> ValueError | None:
    """The error for a value that is no number, or for a step that is not a whole one from 0 on."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ValueError(f"{what}: got {type(value).__name__} for {key!r}; wanted a number")
    if key == "step" and (value < 0 or value != int(value)):
        return ValueError(f"{what}: got {value} for 'step'; wanted a whole number of at least 0")
    return None
