"""The stdin of a node that another launcher has started: heartbeats and requests to end come by it."""

from __future__ import annotations

import os
import select
import signal
import threading

from zero.launch.contract import INTERRUPT, TERMINATE

_CHUNK = 4096
_REQUESTS = {INTERRUPT: signal.SIGINT, TERMINATE: signal.SIGTERM}


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
        number = None
        while number != signal.SIGHUP:
            if (number := self._next()) is not None:
                self.request = self.request or number
                self._signals.append(number)

    def _next(self) -> signal.Signals | None:
        poll = select.poll()
        poll.register(self._stdin, select.POLLIN)
        if not poll.poll(self._seconds * 1000 if self._seconds else None):
            return signal.SIGHUP
        try:
            data = os.read(self._stdin, _CHUNK)
        except OSError:
            data = b""
        if not data:
            return signal.SIGHUP
        return next((_REQUESTS[bytes([byte])] for byte in data if bytes([byte]) in _REQUESTS), None)


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
