"""Tensors in whatever modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside nested tuples, lists, sets, mappings and dataclasses (so also a `ModelOutput`)."""
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


def memory_of(tensor: torch.Tensor) -> int | None:
    """What tells a tensor's memory from all other: equal for all views of one storage; None where it has none."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # a sparse tensor, or one inside vmap
        return None


def holders_of(tensor: torch.Tensor) -> int:
    """How many tensors share the memory of this one, itself counted."""
    return torch._C._storage_Use_Count(memory_of(tensor))


def different(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where the bits of two tensors [n] of one dtype differ, bool [n]; a NaN is equal to itself."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return one.contiguous().view(bits) != other.contiguous().view(bits)
