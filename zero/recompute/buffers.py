"""Buffers that a forward changes, such as running statistics: a recomputation finds them as its forward did.

Without that, statistics would move twice for each batch, and what a forward computes from them, such as a weight
divided by an estimate of its norm, would be another value in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn


class Found(NamedTuple):
    """A buffer before a forward; `values` is what it held, a copy unless it belongs to a graph."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    values: torch.Tensor


def found_in(module: nn.Module | None) -> list[Found]:
    """All buffers of `module`, before a forward of which it is not known what it changes."""
    found: list[Found] = []
    if module is None:
        return found
    copies: dict[int, torch.Tensor] = {}  # one for all names of a tensor
    for owner in module.modules():
        for name, tensor in owner._buffers.items():
            if tensor is None:
                continue
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor if tensor.requires_grad else tensor.clone()
            found.append(Found(owner, name, tensor, _version(tensor), copies[id(tensor)]))
    return found


def changed(found: list[Found]) -> list[Found]:
    """Those that were written since, or gave their place to another tensor, and others of the same owner.

    Others, because batch norm writes its statistics without a trace; only its count of batches tells.
    """
    owners = {
        each.owner
        for each in found
        if each.owner._buffers.get(each.name) is not each.tensor or _version(each.tensor) != each.version
    }
    return [each for each in found if each.owner in owners]


@contextlib.contextmanager
def as_of(found: list[Found]) -> Iterator[None]:
    """Inside, the buffers are what they were; what is written to them there does not stay."""
    now = [(each, each.owner._buffers.get(each.name)) for each in found]
    copies: dict[int, torch.Tensor] = {}  # several recomputations of one call begin alike
    for each in found:
        values = each.values
        if id(values) not in copies:
            copies[id(values)] = values if values.requires_grad else values.clone()
        each.owner._buffers[each.name] = copies[id(values)]
    try:
        yield
    finally:
        for each, tensor in now:
            each.owner._buffers[each.name] = tensor


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # one of inference mode has none, and refuses to be written
