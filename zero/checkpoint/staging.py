"""The bytes of a tensor in host memory, block by block, wherever the tensor is, or from where its numbers come."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from zero.checkpoint.index import CHUNK
from zero.memory.streams import Event, record_event

STEP = 16 << 20  # bytes of one of the two buffers
ASKED = CHUNK // 2  # numbers that are asked for at once, at least; blocks of any dtype are whole CHUNKs


class LazyTensor(NamedTuple):
    """Numbers that come range by range while they are written, so that a tensor larger than memory can be.

    `count` numbers of `dtype`; of(start, n) gives those of [start, start + n), [n], on any device, in any dtype.

    Where `of` gives another dtype, they are rounded as torch rounds.
    """

    dtype: torch.dtype
    count: int
    of: Callable[[int, int], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.count * self.dtype.itemsize

    def numel(self) -> int:
        """As of a tensor."""
        return self.count

    def blocks(self) -> Iterator[torch.Tensor]:
        """All of them in order, contiguous on the CPU, a few CHUNKs each but for the last."""
        step = max(ASKED, CHUNK // self.dtype.itemsize)
        for start in range(0, self.count, step):
            yield self.of(start, min(step, self.count - start)).to("cpu", self.dtype).contiguous()


def host_bytes(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; the tensor must outlive it."""
    if not values.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())).cast("B")


class Staging:
    """Two buffers, made when a device needs them: one is filled while the other is written. For one thread."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def blocks(self, values: torch.Tensor | LazyTensor) -> Iterator[memoryview]:
        """The bytes of a contiguous tensor in order; each block is valid until the next is asked for.

        What lies on the CPU is one block and is not copied.
        """
        if isinstance(values, LazyTensor):
            for block in values.blocks():
                yield host_bytes(block)
            return
        flat = values.view(-1).view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)
        if flat.device.type == "cpu":
            yield host_bytes(flat)
            return
        pinned = flat.device.type == "cuda"
        if not self._buffers:
            self._buffers = [torch.empty(STEP, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        filled = None
        for index, begin in enumerate(range(0, flat.numel(), STEP)):
            part = flat[begin : begin + STEP]
            place = self._buffers[index % 2][: part.numel()]
            place.copy_(part, non_blocking=pinned)
            arrived = record_event(flat.device)
            if filled is not None:
                yield _arrived(*filled)
            filled = place, arrived
        if filled is not None:
            yield _arrived(*filled)


def _arrived(place: torch.Tensor, mark: Event | None) -> memoryview:
    if mark is not None:
        mark.synchronize()
    return host_bytes(place)
