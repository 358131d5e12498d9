"""Ties a module's forward and backward to the gatherer; only where parameters are cut between uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.core.gathering import Gatherer
from zero.core.unit import Unit


def attach(
    needs: Mapping[nn.Module, Sequence[Unit]], gatherer: Gatherer, begin_backward: Callable[[], None]
) -> list[RemovableHandle]:
    """Hook every module that reads units: `needs` maps it to those units. Returns handles that undo it.

    Both the module at which a unit is anchored and every module that owns one of its parameters are hooked:
    the first keeps the unit through a whole block, the others make tied weights, modules called on their
    own, and losses taken from the middle of a block find their parameters.
    """
    handles = []
    for module, units in needs.items():
        # Closures, not partials or methods: copying a module must not copy the engine along.
        before, after = _forward_hooks(tuple(units), gatherer, begin_backward)
        handles.append(module.register_forward_pre_hook(before, prepend=True))
        handles.append(module.register_forward_hook(after, always_call=True))
    return handles


def _forward_hooks(
    units: tuple[Unit, ...], gatherer: Gatherer, begin_backward: Callable[[], None]
) -> tuple[Callable[..., None], Callable[..., None]]:
    def before(module: nn.Module, args: Any) -> None:
        gatherer.enter(units)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        gatherer.leave(units)
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                # A leaf would keep the hook for ever; it has no backward of ours behind it either.
                if tensor.grad_fn is not None:
                    tensor.register_hook(reached)

    def reached(grad: torch.Tensor) -> None:
        # The first gradient to come into the module: its backward is about to read the parameters.
        begin_backward()
        gatherer.use(units)

    return before, after


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside nested tuples, lists, mappings and dataclasses (so also a `ModelOutput`)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
