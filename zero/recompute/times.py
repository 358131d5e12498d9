"""How long recomputed calls take, forward and again, in the log."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import torch

from zero.log import rank_zero


class Times:
    """Adds up calls until all were recomputed, or the next forward begins, and logs one line then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls = [0, 0]  # forwards, recomputations
        self._seconds = [0.0, 0.0]

    @contextlib.contextmanager
    def measure(self, again: bool) -> Iterator[None]:
        """Around one forward, or one recomputation (`again`). Waits for the device on both ends."""
        if not again and self._calls[1]:
            self._log()
        begin = self._now()
        try:
            yield
        finally:
            self._calls[again] += 1
            self._seconds[again] += self._now() - begin
            if again and self._calls[1] >= self._calls[0]:
                self._log()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _log(self) -> None:
        (forwards, recomputations), (forward, again) = self._calls, self._seconds
        rank_zero(
            logging.INFO,
            "recomputed calls: %d forward in %.2f ms, %d again in %.2f ms",
            *(forwards, forward * 1e3, recomputations, again * 1e3),
        )
        self._calls, self._seconds = [0, 0], [0.0, 0.0]
