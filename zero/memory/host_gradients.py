"""The reduced gradient of one unit in host memory: it leaves the device during the backward."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from zero.kernels.bucket import sum_rows
from zero.kernels.norm import sum_squares_into
from zero.memory.available import host_threads
from zero.memory.streams import Event, SideStream


class StagingBuffers:
    """Two buffers for sums that are added to others in host memory: one arrives while the other is added.

    worker: the thread that adds them, so that the backward goes on; it ends when this object is collected.
    """

    def __init__(self, device: torch.device, separate: bool, copies: SideStream) -> None:
        """`separate`: the device has separate memory, from which the stream `copies` brings the sums."""
        self.separate = separate
        self.worker = ThreadPoolExecutor(1, "zero-staging")  # starts its thread when it is first used
        self.copies = copies
        self._pinned = device.type == "cuda"
        self._places: list[torch.Tensor | None] = [None, None]
        self._users: list[HostGradAccumulator | None] = [None, None]
        self._next = 0

    def reserve(self, user: HostGradAccumulator, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory [numel] for `user`, which becomes free once its sum is added."""
        index, self._next = self._next, 1 - self._next
        before, self._users[index] = self._users[index], user
        if before is not None:
            before.wait()
        nbytes, place = numel * dtype.itemsize, self._places[index]
        if place is None or place.numel() < nbytes:
            self._places[index] = place = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        return place[:nbytes].view(dtype)


class HostGradAccumulator:
    """A sum over ranks and micro-batches [n] that adds up in host memory; used as zero/core/accumulator.py is.

    memory: [n], of 16 bits if they hold the first sum exactly, until a second sum is added.
    """

    def __init__(self, memory: torch.Tensor, kept: torch.dtype, staging: StagingBuffers) -> None:
        """`kept`: the dtype in which sums add up."""
        self.memory = self._base = memory
        self._squares: torch.Tensor | None = None
        self._count = 0  # of sums since the last `clear`
        self._exposed = False  # a caller got `memory` since then, and may have written to it
        self._kept = kept
        self._staging = staging
        self._arrived: Event | None = None
        self._adding: Future[None] | None = None  # the addition of a sum that arrives in a staging buffer

    @property
    def held(self) -> bool:
        """Whether there is a sum."""
        return self._count > 0

    def add(self, total: torch.Tensor) -> None:
        """Start to copy `total` [n], in any dtype, from the device: as the sum, or to be added to it."""
        # 16 bits hold one sum of 16 bits; the sum of several local backwards has more.
        if self.memory.dtype != self._kept and (self.held or total.dtype != self.memory.dtype):
            self.wait()
            self.memory = self.memory.to(self._kept)  # for this step; memory was planned for 16 bits
        if self._staging.separate:
            self._bring(total)
        elif self.held:
            self.memory.add_(total)
        else:
            self.memory.copy_(total)
        self._count += 1

    def add_rows(self, inbox: Any) -> bool:
        """Add the sum of an `Inbox` without memory for it: one row, or in fp32 if the device adds here; else False."""
        if len(inbox.rows) == 1:
            inbox.arrive()
            self.add(inbox.rows[0])
            return True
        if self._staging.separate or self.memory.dtype != torch.float32:
            return False
        inbox.sum(self.memory, self.held)
        self._count += 1
        return True

    def total(self) -> torch.Tensor | None:
        """Wait for the sum, and return it; it may be read and written."""
        if not self.held:
            return None
        self.wait()
        self._exposed = True
        return self.memory

    hand_over = total  # the next sum uses the same storage, and waits for the update

    def squares(self) -> torch.Tensor | None:
        """The sum of the squares of the total, an fp64 number on the device; None if it came in several pieces."""
        return self._squares_added if self._count == 1 else None

    def parts(self) -> list[torch.Tensor]:
        """The sum, in a list."""
        return [self.total()] if self.held else []

    def finite_as(self) -> list[torch.Tensor]:
        """Tensors that are finite exactly if the sum is: for a sum from the device a number there, without a wait."""
        return self.parts() if self._squares_added is None else [self._squares_added]

    def clear(self) -> None:
        """Drop the sum."""
        self.wait()  # a copy under way still writes
        self.memory = self._base
        self._count = 0
        self._exposed = False

    @property
    def _squares_added(self) -> torch.Tensor | None:
        """The sum of the squares of all sums that came from the device: an fp64 number there; else None."""
        return self._squares if self._count and not self._exposed else None

    def wait(self) -> None:
        """Wait for copies and additions under way."""
        arrived, self._arrived = self._arrived, None
        adding, self._adding = self._adding, None
        if arrived is not None:
            arrived.synchronize()
        if adding is not None:
            adding.result()

    def _add(self, staged: torch.Tensor, arrived: Event | None) -> None:
        """Add the sum in `staged` [n] once it has arrived."""
        if arrived is not None:
            arrived.synchronize()
        if self.memory.dtype == torch.float32:
            # With all threads: torch has only one if a launcher set OMP_NUM_THREADS.
            sum_rows([staged], self.memory, True, host_threads())
        else:
            self.memory.add_(staged)

    def _bring(self, total: torch.Tensor) -> None:
        self.wait()
        copies, target = self._staging.copies, self.memory
        if self.held:
            target = self._staging.reserve(self, total.numel(), total.dtype)
        # Converted on the device, so that only the bytes of the target's dtype are copied.
        sent = total.to(target.dtype)
        if self._squares is None:
            self._squares = torch.zeros((), dtype=torch.float64, device=sent.device)
        # On the device, where a pass takes a hundredth of the time of one over host memory.
        sum_squares_into(sent, self._squares, accumulate=self.held)
        with copies.after_current():
            target.copy_(sent, non_blocking=True)
        copies.record_stream(sent)  # made by another stream, and dropped here before the copy has read it
        arrived = copies.record_event()
        if self.held:
            self._adding = self._staging.worker.submit(self._add, target, arrived)
        else:
            self._arrived = arrived
