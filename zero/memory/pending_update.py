"""An update of a unit that runs beside the training loop, and the time spent waiting for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any


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


class PendingUpdate:
    """One update's future result: an event after which the device has it, or None.

    Unlike with concurrent.futures, a thread that waits holds no lock which `run` needs: Ctrl-C may come as a lock has
    just been taken, Python then leaves it so, and the updating thread, which the interpreter waits for, would hang.

    ended: `run` is over; error: what it raised.
    """

    def __init__(self, waits: Waits) -> None:
        self.ended = False
        self.error: BaseException | None = None
        self._result: Any = None
        self._process = os.getpid()  # whose thread computes it
        self._waits = waits
        self._running = threading.Lock()
        self._running.acquire()

    def run(self, compute: Callable[..., Any], *args: Any) -> None:
        """Compute it, once; any thread may."""
        try:
            self._result = compute(*args)
        except BaseException as error:
            self.error = error.with_traceback(None)  # whose frames would keep memory; its cause has the place
        self.ended = True
        self._running.release()

    @property
    def forked(self) -> bool:
        """Whether this is a forked process, which lacks the thread."""
        return self._process != os.getpid()

    def wait(self) -> None:
        """Wait for the end."""
        start = time.perf_counter()
        while not self.ended:  # so that nothing hangs that comes after an interrupted wait
            with self._running:
                pass
            self._waits.add(time.perf_counter() - start)

    def result(self) -> Any:
        """Wait for the result; raises the update's error, each time."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._result
