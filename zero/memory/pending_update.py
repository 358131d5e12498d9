"""An update of a unit that runs beside the training loop, as those see it who have to wait for it."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from typing import Any, NamedTuple


class Waits:
    """Seconds that somebody has waited for updates since the last `take`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._counting = threading.Lock()  # several threads may wait at once

    def add(self, seconds: float) -> None:
        """Somebody has waited so long."""
        with self._counting:
            self._seconds += seconds

    def take(self) -> float:
        """The seconds so far, which count from 0 again."""
        with self._counting:
            taken, self._seconds = self._seconds, 0.0
        return taken


class PendingUpdate(NamedTuple):
    """The result of one update to come: an event after which the device has it, or None.

    process: whose thread computes it.
    """

    future: Future[Any]
    process: int
    waits: Waits

    @property
    def forked(self) -> bool:
        """Whether this is a forked process, which has not got the thread."""
        return self.process != os.getpid()

    def result(self) -> Any:
        """Wait for it; raises what the update raised, each time."""
        if self.future.done():
            return self.future.result()
        start = time.perf_counter()
        try:
            return self.future.result()
        finally:
            self.waits.add(time.perf_counter() - start)
