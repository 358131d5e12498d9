"""A copy of what a save will write, in host memory that is taken once and used again by the next save."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.checkpoint.safe_file import TensorChunk
from zero.memory.store import ALIGNED
from zero.plan.layout import round_up


class Snapshot:
    """Room for the chunks of one save. pinned: whether a GPU copies into it."""

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._mark: torch.cuda.Event | None = None
        self.chunks: list[TensorChunk] = []

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return 0 if self._memory is None else self._memory.numel()

    def begin(self, forms: Sequence[TensorChunk]) -> None:
        """Make room for these, and forget what was in it; MemoryError where there is none."""
        wanted = max(ALIGNED, sum(round_up(form.values.nbytes, ALIGNED) for form in forms))
        self.clear()
        if wanted > self.nbytes:
            self._memory = None  # before there are two
            try:
                self._memory = torch.empty(wanted, dtype=torch.uint8, pin_memory=self._pinned)
            except RuntimeError as error:
                raise MemoryError(f"an asynchronous save needs {wanted} bytes of host memory: {error}") from None

    def take(self, chunk: TensorChunk) -> None:
        """Copy a chunk; on a GPU behind what its current stream does, which goes on behind the copy."""
        values = chunk.values
        place = self._memory.narrow(0, self._used, values.nbytes).view(values.dtype)
        place.copy_(values, non_blocking=self._pinned)
        self._used = round_up(self._used + values.nbytes, ALIGNED)
        self.chunks.append(chunk._replace(values=place))
        if values.device.type == "cuda":
            self._mark = torch.cuda.current_stream(values.device).record_event()

    def wait(self) -> list[TensorChunk]:
        """The copies, once they are there."""
        if self._mark is not None:
            self._mark.synchronize()
            self._mark = None
        return self.chunks

    def clear(self) -> None:
        """Forget the chunks, but keep the memory."""
        self.chunks, self._used, self._mark = [], 0, None
