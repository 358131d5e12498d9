"""The reduced gradient of one unit in host memory: it leaves the device while the backward goes on."""

from __future__ import annotations

import torch

from zero.core.lane import Lane


class Landing:
    """Where sums that are to be added to others in host memory arrive; two, so that one comes while one is added."""

    def __init__(self, device: torch.device, apart: bool) -> None:
        """`apart`: the device has memory of its own, from which sums must be brought."""
        self.apart = apart
        self.down = Lane(device)
        self._pinned = device.type == "cuda"
        self._places: list[torch.Tensor | None] = [None, None]
        self._users: list[HostSum | None] = [None, None]
        self._next = 0

    def place(self, user: HostSum, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory [numel] for `user`, free once it has landed."""
        index, self._next = self._next, 1 - self._next
        before, self._users[index] = self._users[index], user
        if before is not None:
            before.land()
        nbytes, place = numel * dtype.itemsize, self._places[index]
        if place is None or place.numel() < nbytes:
            self._places[index] = place = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        return place[:nbytes].view(dtype)


class HostSum:
    """A sum over ranks and micro-batches [n] that adds up in host memory.

    memory: [n]: of 16 bits where they hold all of what comes, until a second sum comes that has to be added;
    held:   whether there is a sum.
    """

    def __init__(self, memory: torch.Tensor, kept: torch.dtype, landing: Landing) -> None:
        """`kept`: the dtype in which sums add up."""
        self.memory = self._base = memory
        self.held = False
        self._kept = kept
        self._landing = landing
        self._arrived: torch.cuda.Event | None = None
        self._staged: torch.Tensor | None = None  # what arrives to be added; None where it arrives in `memory` itself

    def add(self, total: torch.Tensor) -> None:
        """Begin to take `total` [n], in any dtype, from the device: as the sum, or to be added to it."""
        # 16 bits hold one sum of 16 bits; what several local backwards have added up comes in more.
        if self.memory.dtype != self._kept and (self.held or total.dtype != self.memory.dtype):
            self.land()
            self.memory = self.memory.to(self._kept)  # for this step; nobody foresaw it
        if self._landing.apart:
            self._bring(total)
        elif self.held:
            self.memory.add_(total)
        else:
            self.memory.copy_(total)
        self.held = True

    def tensor(self) -> torch.Tensor:
        """The sum, once it is here."""
        self.land()
        return self.memory

    def clear(self) -> None:
        """Forget the sum."""
        self.land()  # what is on its way still writes
        self.memory = self._base
        self.held = False

    def land(self) -> None:
        """Wait for what is on its way, and add it."""
        arrived, self._arrived = self._arrived, None
        staged, self._staged = self._staged, None
        if arrived is not None:
            arrived.synchronize()
        if staged is not None:
            self.memory.add_(staged)

    def _bring(self, total: torch.Tensor) -> None:
        self.land()
        lane, target = self._landing.down, self.memory
        if self.held:
            target = self._staged = self._landing.place(self, total.numel(), total.dtype)
        with lane.behind():
            # Converted on the device, where it is: the bytes that travel are those of the target.
            target.copy_(total.to(target.dtype), non_blocking=True)
        lane.keep(total)
        self._arrived = lane.mark()
