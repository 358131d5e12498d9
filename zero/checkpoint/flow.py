"""Numbers that come range by range while they are written, so that a tensor larger than memory can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from zero.checkpoint.index import CHUNK

STEP = CHUNK // 2  # numbers that are asked for at once, at least; blocks of any dtype are whole CHUNKs


class Flow(NamedTuple):
    """`count` numbers of `dtype`; of(start, n) gives those of [start, start + n), [n], on any device, in any dtype.

    Where `of` gives another dtype, they are rounded as torch rounds.
    """

    dtype: torch.dtype
    count: int
    of: Callable[[int, int], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.count * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a tensor with one dim."""
        return (self.count,)

    def numel(self) -> int:
        """As of a tensor."""
        return self.count

    def element_size(self) -> int:
        """Bytes of one number, as of a tensor."""
        return self.dtype.itemsize

    def blocks(self) -> Iterator[torch.Tensor]:
        """All of them in order, contiguous on the CPU, a few CHUNKs each but for the last."""
        step = max(STEP, CHUNK // self.dtype.itemsize)
        for start in range(0, self.count, step):
            yield self.of(start, min(step, self.count - start)).to("cpu", self.dtype).contiguous()
