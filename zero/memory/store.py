"""Where the state of a unit rests between uses: device memory, host memory, or a file.

`fetch` begins to read it, `acquire` waits until it may be used, `write_back` ends the use. Callers never ask where it
rests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.memory.host_bytes import LINE
from zero.plan.layout import round_up


class Store:
    """Keeps the bytes of a few tensors; the tensor objects stay the same, their memory may come and go.

    This one has them in memory all the time, so that most verbs have nothing to do.

    resident: the tensors may be read and written at any time.
    """

    resident = True

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        """`memory`: uint8 [n] into which tensors are moved while there is room; None leaves them where they are."""
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
        """Start to read them; False if there is no memory for that now, in which case `acquire` waits for it."""
        return True

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
        self._memory = None


def move(tensor: torch.Tensor, memory: torch.Tensor, at: int) -> None:
    """Copy a tensor [n] to byte `at` of `memory` (uint8), and make the same object refer to it there."""
    target = memory.narrow(0, at, tensor.nbytes).view(tensor.dtype)
    target.copy_(tensor)
    tensor.set_(target)
