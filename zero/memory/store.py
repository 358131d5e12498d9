"""Where the state of a unit rests between uses: device memory, host memory, or a file.

`fetch` begins to bring it, `lend` waits until it may be read and written, `flush` begins to put it back. Whoever uses
state goes through the three verbs and never asks where it rests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from zero.plan.layout import round_up

ALIGNED = 64  # bytes; a cache line, and an AVX-512 vector


class Store(Protocol):
    """Keeps the bytes behind a few tensors; the tensor objects stay the same, their memory comes and goes.

    permanent: the tensors may be read and written at any time.
    """

    permanent: bool

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take over these tensors, one-dimensional, and their values; in addition to those that were put before."""

    def fetch(self) -> bool:
        """Begin to bring them; False where there is no room for that now, and `lend` will wait for it."""

    def unfetch(self) -> None:
        """What `fetch` has begun is not needed any more; others may have its room. Never waits."""

    def lend(self, blank: bool = False) -> None:
        """Wait until the tensors may be read and written, which they may until `flush`. Nests.

        `blank`: who asks reads nothing and writes all of them, or none.
        """

    def flush(self, written: bool = True, after: torch.cuda.Event | None = None) -> None:
        """Begin to put them back; unless `written`, they are as they were. A device reads them until `after`."""

    def close(self) -> None:
        """Give everything back; the values are lost."""


class Resident:
    """A store whose tensors are always there.

    memory: uint8 [n] into which tensors are moved while there is room; None leaves them where they are.
    """

    permanent = True

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

    def unfetch(self) -> None:
        """See `Store.unfetch`."""

    def lend(self, blank: bool = False) -> None:
        """See `Store.lend`."""

    def flush(self, written: bool = True, after: torch.cuda.Event | None = None) -> None:
        """See `Store.flush`."""

    def close(self) -> None:
        """See `Store.close`."""
        self._memory = None


def move(tensor: torch.Tensor, memory: torch.Tensor, at: int) -> None:
    """Copy a tensor [n] to byte `at` of `memory` (uint8), and have the same object be there from now on."""
    place = memory.narrow(0, at, tensor.nbytes).view(tensor.dtype)
    place.copy_(tensor)
    tensor.set_(place)
