"""The stdin of a node that another launcher has started: heartbeats and requests to end come by it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

from zero.launch.contract import INTERRUPT, TERMINATE

_CHUNK = 4096
_REQUESTS = {ord(INTERRUPT): signal.SIGINT, ord(TERMINATE): signal.SIGTERM}


class HeartbeatReader:
    """Adds to `signals` what the launcher asks for, and SIGHUP when the launcher is gone.

    A byte I asks for SIGINT, T for SIGTERM; another one only says that the launcher is there. It is gone at the end
    of stdin, and when `seconds`, where above 0, pass without a byte. The ranks get an empty stdin.

    Attributes:
        request: the signal that came this way first; None so far.
    """

    def __init__(self, seconds: int, signals: list[int]) -> None:
        self.request: signal.Signals | None = None
        self._seconds = seconds
        self._signals = signals
        self._stdin = take_stdin()
        threading.Thread(target=self._run, name="zero-heartbeat", daemon=True).start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stdin, select.POLLIN)
        number = None
        while number != signal.SIGHUP:
            data = b""
            if poll.poll(self._seconds * 1000 if self._seconds else None):
                with contextlib.suppress(OSError):
                    data = os.read(self._stdin, _CHUNK)
            number = next((_REQUESTS[byte] for byte in data if byte in _REQUESTS), None) if data else signal.SIGHUP
            if number is not None:
                self.request = self.request or number
                self._signals.append(number)


def take_stdin() -> int:
    """Leave the ranks an empty stdin, and return the file number of what was there."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        stdin = os.dup(0)
    except OSError:  # it was closed
        stdin = os.dup(nothing)
    os.dup2(nothing, 0)
    if nothing:
        os.close(nothing)
    return stdin
