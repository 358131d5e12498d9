"""Private memory of a process (RssAnon), sampled while something runs; pages of mapped files are the system's."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

MIB = 1 << 20
SLACK = 60 * MIB


class Sampled:
    """The most bytes of private memory that this process had inside the block, above those at its start."""

    def __enter__(self) -> Sampled:
        gc.collect()
        self._before = self.peak = _private()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.005):
            self.peak = max(self.peak, _private())

    @property
    def growth(self) -> int:
        return self.peak - self._before


def _private() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
