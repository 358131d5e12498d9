"""Marks of changed elements, one bit each: element i is bit i % 8 of byte i // 8; and updates made from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # elements compared at a time; a multiple of 8


def nbytes(numel: int) -> int:
    """Bytes of the marks of `numel` elements."""
    return -(-numel // 8)


def mark(marks: Tensor, before: Tensor, now: Tensor) -> None:
    """Set the bits of `marks` (uint8) whose elements differ in any bit between two tensors [n] of one dtype."""
    kind = _BITS[now.element_size()]
    for start in range(0, now.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        changed = before[part].view(kind) != now[part].view(kind)
        packed = pack(changed)
        marks[start // 8 : start // 8 + packed.numel()] |= packed


def pack(flags: Tensor) -> Tensor:
    """Marks, uint8 [nbytes(n)], of the elements where `flags`, bool [n], are set."""
    whole = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    return (whole << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(1, dtype=torch.uint8)


def unpack(marks: Tensor, numel: int) -> Tensor:
    """The marked elements, as bool [numel]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=marks.device)
    return ((marks.unsqueeze(1) >> shifts) & 1).view(-1)[:numel].bool()


class Changes:
    """The changes in one shard since this object was made.

    steps: marks of the optimizer's steps, uint8 [nbytes(numel)] on `device`, or None before the first;
    all:   something other than a step has written into the shard.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.steps: Tensor | None = None
        self.all = False
        self._numel = numel
        self._device = device

    def marks(self) -> Tensor:
        """The marks of steps, for a running one to set."""
        if self.steps is None:
            self.steps = torch.zeros(nbytes(self._numel), dtype=torch.uint8, device=self._device)
        return self.steps


class WeightUpdate(NamedTuple):
    """The changed elements of one parameter or buffer.

    where:  int32 [k]: their indices in the flattened tensor; uint8 [numel / 8, rounded up]: bit i % 8 of byte
            i // 8 is set where element i has changed, k of them; None: all may have;
    values: those elements [k] in order, or the whole tensor.
    """

    name: str
    where: Tensor | None
    values: Tensor

    @torch.no_grad()
    def apply_to(self, tensor: Tensor) -> None:
        """Write it into a copy of the earlier tensor, contiguous, of any dtype and on any device."""
        values = self.values.to(tensor.device, tensor.dtype)
        if self.where is None:
            tensor.copy_(values)
            return
        where = self.where.to(tensor.device)
        tensor.view(-1)[unpack(where, tensor.numel()) if where.dtype == torch.uint8 else where.long()] = values
