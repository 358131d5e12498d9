"""Tensors in whatever modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch


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
    if isinstance(output, MutableMapping):
        loss = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, (tuple, list)) and output:
            loss = output[0]
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
