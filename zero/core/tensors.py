"""Tensors in whatever modules take and return."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

# Objects within objects that are looked into: a mixture of independent distributions of a family is four.
_DEPTH = 4
_NOT_LOOKED_INTO = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside nested tuples, lists, sets, mappings, dataclasses (so also a `ModelOutput`), other objects.

    An object, such as a distribution or a cache of keys and values, is looked into for its attributes; modules are not.
    """
    return _tensors_in(value, _DEPTH, set())


def _tensors_in(value: Any, depth: int, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item, depth, seen)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from _tensors_in(item, depth, seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # it may have slots
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name, None), depth, seen)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, _NOT_LOOKED_INTO) and id(value) not in seen:
        seen.add(id(value))
        for item in list(vars(value).values()):
            yield from _tensors_in(item, depth - 1, seen)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every leaf changed: all but tuples, lists, mappings and dataclasses (so also a `ModelOutput`).

    Containers around a leaf that changed are copied, never changed themselves; others are returned as they are.
    """
    if isinstance(value, (tuple, list)):
        items = [map_leaves(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        old = dict(value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        old = {name: getattr(value, name) for name in names if hasattr(value, name)}
    else:
        return change(value)
    changed = {key: map_leaves(item, change) for key, item in old.items()}
    if all(changed[key] is old[key] for key in old):
        return value
    copied = copy.copy(value)  # keeps the class, and its other attributes
    for key, item in changed.items():
        if isinstance(value, MutableMapping):
            copied[key] = item
        else:
            object.__setattr__(copied, key, item)  # of a frozen one too
    return copied


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned: the scalar itself, `.loss`, `["loss"]` or `[0]`; None if there is none."""
    loss = output
    if isinstance(output, dict):
        loss = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, (tuple, list)) and output:
            loss = output[0]
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
