"""Where the state of a unit rests between uses: device memory, host memory, or a file.

`fetch` begins to read it, `acquire` waits until it may be used, `write_back` ends the use. Callers never ask where
it rests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.memory.streams import Event
from zero.plan.layout import round_up
from zero.plan.memory import LINE


class Store:
    """Keeps the bytes of a few tensors, here in memory; the tensor objects stay the same, their memory may change.

    resident: the tensors may be read and written at any time.
    """

    resident = True

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        """`memory`: uint8 [n] into which tensors are moved; None leaves them where they are."""
        self._memory = memory
        self._used = 0

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take over these one-dimensional tensors and their values, in addition to earlier ones."""
        for tensor in tensors:
            if self._memory is None or self._used + tensor.nbytes > self._memory.numel():
                continue
            move(tensor, self._memory, self._used)
            self._used = round_up(self._used + tensor.nbytes, LINE)

    def fetch(self) -> bool:
        """Start to read the tensors; False if no memory is free, in which case `acquire` waits for it."""
        return True

    def cancel_fetch(self) -> None:
        """Drop the result of `fetch`; its memory may be reused. Never waits."""

    def acquire(self, overwrite: bool = False) -> None:
        """Wait until the tensors may be used, until `write_back`; nests. `overwrite`: all are written, none read."""

    def write_back(self, changed: bool = True, after: Event | None = None) -> None:
        """End a use, and start to write the tensors if `changed`; a device reads them until the event `after`."""

    @property
    def place(self) -> torch.Tensor | None:
        """The memory of the tensors, uint8; valid while they are acquired."""
        return self._memory

    def close(self) -> None:
        """Free all memory; the values are lost."""
        self._memory = None


class PassingStore(Store):
    """A store of `nbytes` bytes whose tensors have memory only while acquired; otherwise they are empty, of shape [0].

    A subclass gives that memory in `place`, and calls `attach` and `detach`. attached: they have memory now.
    """

    resident = False

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.attached = False
        self._entries: list[tuple[torch.Tensor, int, int]] = []  # with its first element in `place`, and elements

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Store.put`; RuntimeError if they need more than was reserved."""
        end, entries = self._used, []
        for tensor in (tensor for tensor in tensors if tensor.numel()):
            entries.append((tensor, end // tensor.itemsize, tensor.numel()))
            end = round_up(end + tensor.nbytes, LINE)
        if end > round_up(self.nbytes, LINE):
            raise RuntimeError(
                f"{self} wants {end} bytes for the state, where {self.nbytes} were reserved at the start; a state that "
                "begins later, such as SGD's momentum in one parameter group, must be in optimizer.params from the "
                "start, or kept with offload_optimizer.device 'cpu' and updated by the host"
            )
        if not entries:
            return
        self.acquire(overwrite=self._used == 0)
        try:
            for tensor, start, _ in entries:
                move(tensor, self.place, start * tensor.itemsize)
            self._entries += entries
            self._used = end
        finally:
            self.write_back()

    def attach(self) -> None:
        """Give the tensors the memory in `place`."""
        self.attached = True
        storage = self.place.untyped_storage()
        for tensor, start, numel in self._entries:
            tensor.set_(storage, start, (numel,), (1,))

    def detach(self) -> None:
        """Make the tensors empty."""
        self.attached = False
        for tensor, _, _ in self._entries:
            tensor.set_()

    def close(self) -> None:
        """See `Store.close`."""
        self.detach()
        self._entries.clear()


def move(tensor: torch.Tensor, memory: torch.Tensor, at: int) -> None:
    """Copy a tensor [n] to byte `at` of `memory` (uint8), and make the same object refer to the copy."""
    target = memory.narrow(0, at, tensor.nbytes).view(tensor.dtype)
    target.copy_(tensor)
    tensor.set_(target)
