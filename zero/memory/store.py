"""Where the state of a unit rests between uses: device memory, host memory, or a file.

`fetch` begins to read it, `acquire` waits until it may be used, `write_back` ends the use. Callers never ask where it
rests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from zero.plan.layout import round_up

ALIGNED = 64  # bytes; a cache line, and an AVX-512 vector


class Store(Protocol):
    """Keeps the bytes of a few tensors; the tensor objects stay the same, their memory comes and goes.

    resident: the tensors may be read and written at any time.
    """

    resident: bool

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take over these one-dimensional tensors and their values, in addition to earlier ones."""

    def fetch(self) -> bool:
        """Start to read them; False if there is no memory for that now, in which case `acquire` waits for it."""

    def cancel_fetch(self) -> None:
        """Nobody needs what `fetch` reads any more; its memory may be reused. Never waits."""

    def acquire(self, overwrite: bool = False) -> None:
        """Wait until the tensors may be read and written, which they may until `write_back`. Nests.

        With `overwrite` their values are not read from where they rest: the caller writes all of them, or none.
        """

    def write_back(self, changed: bool = True, after: torch.cuda.Event | None = None) -> None:
        """End a use, and start to write the tensors if they were `changed`; a device reads them until `after`."""

    def close(self) -> None:
        """Free all memory; the values are lost."""


class ResidentStore:
    """A store whose tensors are always in memory.

    memory: uint8 [n] into which tensors are moved while there is room; None leaves them where they are.
    """

    resident = True

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        self._memory = memory
        self._used = 0

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Store.put`."""
        for tensor in tensors:
            if self._memory is None or self._used + tensor.nbytes > self._memory.numel():
                continue
            move(tensor, self._memory, self._used)
            self._used = round_up(self._used + tensor.nbytes, ALIGNED)

    def fetch(self) -> bool:
        """See `Store.fetch`."""
        return True

    def cancel_fetch(self) -> None:
        """See `Store.cancel_fetch`."""

    def acquire(self, overwrite: bool = False) -> None:
        """See `Store.acquire`."""

    def write_back(self, changed: bool = True, after: torch.cuda.Event | None = None) -> None:
        """See `Store.write_back`."""

    def close(self) -> None:
        """See `Store.close`."""
        self._memory = None


def move(tensor: torch.Tensor, memory: torch.Tensor, at: int) -> None:
    """Copy a tensor [n] to byte `at` of `memory` (uint8), and make the same object refer to it there."""
    target = memory.narrow(0, at, tensor.nbytes).view(tensor.dtype)
    target.copy_(tensor)
    tensor.set_(target)
