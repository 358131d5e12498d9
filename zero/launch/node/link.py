"""One connection between the launchers of two hosts: messages as lines of JSON, and when the other was last heard."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from typing import Any

_MOST = 1 << 22  # bytes of one message; what sends more is no launcher
_CHUNK = 1 << 16


class Link:
    """A connection on which no call ever waits. Any thread may send; one thread receives.

    Attributes:
        heard: when the last byte came, on the clock of `time.monotonic`.
        gone: whether the connection has ended, or carried what is no message.
        node: the number of the host at the other end, once it is known.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.heard = time.monotonic()
        self.gone = False
        self.node: int | None = None
        self._lock = threading.Lock()
        self._out = b""
        self._in = b""

    def send(self, **message: Any) -> None:
        """Send `message` as far as that goes now; `flush` sends the rest."""
        with self._lock:
            self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Send what is left; whether all is sent."""
        with self._lock:
            try:
                while self._out and not self.gone:
                    self._out = self._out[self.connection.send(self._out) :]
            except BlockingIOError:
                return False
            except OSError:
                self.gone = True
            return not self._out

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come since the last call."""
        try:
            while chunk := self.connection.recv(_CHUNK):
                self.heard = time.monotonic()
                self._in += chunk
                if len(self._in) > _MOST:
                    raise OSError("this is no message")
            self.gone = True
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
        *lines, self._in = self._in.split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
            if not all(isinstance(message, dict) for message in found):
                raise ValueError("this is no message")
        except ValueError:
            self.gone = True
            return []
        return found

    def local_address(self) -> str | None:
        """The address of this machine that the connection uses; None where it has ended."""
        try:
            return self.connection.getsockname()[0]
        except OSError:
            return None

    def close(self) -> None:
        """End the connection."""
        self.gone = True
        self.connection.close()


def readable(sockets: list[socket.socket], seconds: float) -> set[socket.socket]:
    """Those of `sockets` on which something has come; waits for the first up to `seconds`."""
    poll = select.poll()  # select() ends at file number 1024
    by_number = {one.fileno(): one for one in sockets if one.fileno() >= 0}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return {by_number[number] for number, _ in poll.poll(seconds * 1000)}
