"""A trained parameter with its optimizer, and whether a key or a value fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zero.core.owner import Owner, owner_of
from zero.core.unit import Unit
from zero.core.values import full_shape, piece
from zero.optim.optimizer import ZeroOptimizer


class TrainedParam(NamedTuple):
    """A parameter that an optimizer updates. Of its states, some are one number for the parameter's whole unit."""

    owner: Owner
    optimizer: ZeroOptimizer

    @property
    def group(self) -> Mapping[str, Any]:
        """The hyperparameters of its parameter group now."""
        return self.optimizer.param_groups[self.owner.unit.plan.group]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter, also where this rank has a part of it."""
        return full_shape(self.owner)

    def is_number(self, key: str) -> bool:
        """Whether state `key` is one number."""
        return key in self.optimizer.states.keys(self.owner.unit, self.group)[1]

    def read(self, key: str) -> torch.Tensor | int | float:
        """This rank's piece of state `key`, fp32 [n], or the one number that it is."""
        unit, states = self.owner.unit, self.optimizer.states
        if self.is_number(key):
            return states.number(unit, self.group, key)
        part = piece(self.owner)
        if not part.numel:
            return torch.empty(0, dtype=torch.float32, device=unit.buffer.full.device)
        return states.read(unit, self.group, key, part)

    def write(self, key: str, value: torch.Tensor | float) -> None:
        """Replace what `read` returns; a piece is fp32 [n] on the device."""
        unit, states = self.owner.unit, self.optimizer.states
        if self.is_number(key):
            states.set_number(unit, self.group, key, float(value))
        elif value.numel():
            states.write(unit, self.group, key, piece(self.owner), value)

    def key_error(self, what: str, key: str) -> ValueError | None:
        """The error for a state that the optimizer does not have, or None."""
        tensors, numbers = self.optimizer.states.keys(self.owner.unit, self.group)
        if key in tensors or key in numbers:
            return None
        known = ", ".join((*tensors, *numbers)) or "none"
        return ValueError(f"{what}: unknown key {key!r} for parameter '{self.owner.name}'; known: {known}")

    def state_error(self, what: str, key: str, value: Any, shape: tuple[int, ...]) -> ValueError | None:
        """The error for a state that the optimizer does not have or a value that it cannot be, or None."""
        problem = self.key_error(what, key)
        if problem is not None:
            return problem
        if not self.is_number(key):
            return self.value_error(what, value, shape)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return ValueError(f"{what}: got {type(value).__name__} for {key!r}; wanted a number")
        if key == "step" and (value < 0 or value != int(value)):
            return ValueError(f"{what}: got {value} for 'step'; wanted a whole number of at least 0")
        return None

    def value_error(self, what: str, value: Any, shape: tuple[int, ...]) -> ValueError | None:
        """The error for a value that is not a tensor of numbers of this shape, or None."""
        wanted = f"wanted a floating-point tensor of shape {tuple(shape)} for parameter '{self.owner.name}'"
        if not isinstance(value, torch.Tensor):
            return ValueError(f"{what}: got a {type(value).__name__}; {wanted}")
        if tuple(value.shape) != tuple(shape) or not value.is_floating_point():
            return ValueError(f"{what}: got shape {tuple(value.shape)}, {value.dtype}; {wanted}")
        return None


def trained_param(param: torch.Tensor) -> TrainedParam | None:
    """None for a parameter that no engine manages or that is not trained."""
    owner = owner_of(param)
    optimizer = owner.unit.optimizer() if owner is not None and isinstance(owner.unit, Unit) else None
    return TrainedParam(owner, optimizer) if optimizer is not None else None


def require_trained(param: torch.Tensor, what: str) -> TrainedParam:
    """The trained parameter; raises ValueError, on all ranks alike, where it is not trained."""
    trained = trained_param(param)
    if trained is None:
        owner = owner_of(param)
        name = f"'{owner.name}' (frozen)" if owner is not None else f"of shape {tuple(param.shape)}"
        raise ValueError(f"{what}: parameter {name} is trained by no engine, so there is nothing to set")
    return trained
