"""The tie of a node to the launcher that started it from another machine: the node's stdin."""

from __future__ import annotations

import os
import select
import signal
import threading

from zero.launch.contract import INTERRUPT, TERMINATE

_CHUNK = 4096
_ASKED = {INTERRUPT: signal.SIGINT, TERMINATE: signal.SIGTERM}


class Tie:
    """Does to this process what its launcher asks for, and hangs up on it (SIGHUP) when the launcher is gone.

    A byte I asks for SIGINT, T for SIGTERM; another one only says that the launcher is there. It is gone at the end
    of stdin, and when `seconds`, where above 0, pass without a byte.

    Attributes:
        pulled: the signal that came by this way, not by one that anybody sent; None so far.
    """

    def __init__(self, seconds: int) -> None:
        self.pulled: signal.Signals | None = None
        self._seconds = seconds
        self._stdin = take_stdin()

    def start(self) -> None:
        """Begin to read; from now on signals can come."""
        threading.Thread(target=self._run, name="zero-tie", daemon=True).start()

    def _run(self) -> None:
        while True:
            asked = self._next()
            if asked is not None:
                self.pulled = self.pulled or asked
                os.kill(os.getpid(), asked)
            if asked == signal.SIGHUP:
                return

    def _next(self) -> signal.Signals | None:
        poll = select.poll()
        poll.register(self._stdin, select.POLLIN)
        if not poll.poll(self._seconds * 1000 if self._seconds else None):
            return signal.SIGHUP
        try:
            found = os.read(self._stdin, _CHUNK)
        except OSError:
            return signal.SIGHUP
        if not found:
            return signal.SIGHUP
        return next((_ASKED[byte] for byte in (found[at : at + 1] for at in range(len(found))) if byte in _ASKED), None)


def take_stdin() -> int:
    """Leave the ranks an empty stdin, and return the file number of what was there."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        found = os.dup(0)
    except OSError:  # it was closed
        found = os.dup(nothing)
    os.dup2(nothing, 0)
    if nothing:
        os.close(nothing)
    return found
