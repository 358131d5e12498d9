"""Slots: memory for the saved inputs of one call each, used again step after step."""

from __future__ import annotations

import logging

import torch

from zero.log import log_once
from zero.memory.copy_stream import CopyStream
from zero.memory.host_bytes import PAGE
from zero.memory.pinned_arena import PinnedArena
from zero.plan.layout import round_up


class Slots:
    """Where bytes are put down, on the device or in host memory, and given back when their graph has gone.

    With `count`, so many slots of the size that is first asked for are carved out of one slab. Without, host slots are
    taken from the system one by one and kept for the next step; device memory comes from torch, which keeps it itself.
    """

    def __init__(self, device: torch.device, host: bool, count: int | None, lane: CopyStream) -> None:
        self._device = device
        self._host = host
        self._count = count
        self._lane = lane
        self._size: int | None = None  # of a slot of the slab, in bytes
        self._free: list[torch.Tensor] = []
        self.nbytes = 0  # taken and not given up, free slots counted; what torch keeps for the next step is not

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of at least `nbytes` bytes; its contents are anything."""
        if self._count is not None and self._size is None:
            self._carve(round_up(nbytes, PAGE), self._count)
        fitting = [slot for slot in self._free if slot.numel() >= nbytes]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            self._free = [slot for slot in self._free if slot is not best]
            return best
        if self._count is not None:
            log_once(
                logging.WARNING,
                f"activation_checkpointing.number_checkpoints: a call with {nbytes} bytes finds no room in the slab of "
                f"{self._count} x {self._size} bytes; what does not fit takes memory of its own",
            )
        if not self._keeps:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if self._free and self._count is None:  # too small for this one, and so for those that come
            self._lane.synchronize()
            self.nbytes -= self._free.pop().numel()
        return self._new(nbytes)

    def give_back(self, slot: torch.Tensor) -> None:
        """Nobody reads these bytes any more, but for copies that were queued before."""
        if self._keeps and (self._count is None or slot.numel() == self._size):
            self._free.append(slot)
        elif self._keeps:  # it found no room in the slab, or is of one that was closed
            self._lane.synchronize()
            self.nbytes -= slot.numel()

    def close(self) -> None:
        """Give free memory back; what is in use goes the same way when it is given back and `close` is called again."""
        self._lane.synchronize()
        self.nbytes -= sum(slot.numel() for slot in self._free)
        self._free = []
        self._size = None

    @property
    def _keeps(self) -> bool:
        return self._host or self._count is not None

    def _carve(self, size: int, count: int) -> None:
        self._size = size
        self._free += self._new(size * count).split(size)

    def _new(self, nbytes: int) -> torch.Tensor:
        self.nbytes += nbytes
        if self._host:
            return PinnedArena(nbytes, self._device, pinned=True).take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
