"""An update of a unit that runs beside the training loop, and the time spent waiting for it."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from typing import Any, NamedTuple


class Waits:
    """Seconds of waiting for updates since the last `take`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._counting = threading.Lock()  # several threads may wait at once

    def add(self, seconds: float) -> None:
        """Add the seconds of one wait."""
        with self._counting:
            self._seconds += seconds

    def take(self) -> float:
        """The seconds so far; the count restarts at 0."""
        with self._counting:
            taken, self._seconds = self._seconds, 0.0
        return taken


class PendingUpdate(NamedTuple):
    """One update's future result: an event after which the device has it, or None.

    process: the process whose thread computes it.
    """

    future: Future[Any]
    process: int
    waits: Waits

    @property
    def forked(self) -> bool:
        """Whether this is a forked process, which lacks the thread."""
        return self.process != os.getpid()

    def result(self) -> Any:
        """Wait for the result; raises the update's error, each time."""
        if self.future.done():
            return self.future.result()
        start = time.perf_counter()
        try:
            return self.future.result()
        finally:
            self.waits.add(time.perf_counter() - start)
