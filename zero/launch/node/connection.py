"""One connection between the launchers of two hosts: signed messages, and when the last one came.

Both ends first send a random number as a line of its own. A key is made of both numbers and the job's secret, and every
line after that is a signature and a message in JSON; the signature covers the key, which end it is and the number of
the line. So each line is worth something only once, at its place, and in this connection. Nothing of the job is sent
before the first such line of the other end has shown that it has the secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from zero.launch.secret import same, signature

_MOST = 1 << 22  # bytes of one message; what sends more is no launcher
_MOST_UNKNOWN = 1 << 10  # the same before it has shown that it has the secret
_CHUNK = 1 << 16
_END = (b"one", b"other")  # who was connected to, and who connected


class Connection:
    """A connection on which no call ever waits. Any thread may send; one thread receives.

    connects: whether this end is the one that has connected. secret: of the job, "" for none.

    Attributes:
        heard: when the last message came, or the connection began, on the clock of `time.monotonic`.
        known: whether the other end has shown that it has the secret; before that there is nothing to be sent.
        gone: whether the connection has ended, or carried what is no message of the job.
        node: the number of the host at the other end, once it is known.
    """

    def __init__(self, peer: socket.socket, secret: str, connects: bool) -> None:
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = peer
        self.heard = time.monotonic()
        self.known = False
        self.gone = False
        self.node: int | None = None
        self._secret = secret.encode(errors="surrogateescape")
        self._connects = connects
        self._number = os.urandom(16).hex().encode()
        self._key = b""
        self._sent = self._taken = 0  # signed lines
        self._lock = threading.Lock()
        self._out = self._number + b"\n"
        self._in = b""
        self.flush()

    def send(self, **message: Any) -> None:
        """Send `message` as far as that goes now; `flush` sends the rest."""
        if not self.known:
            raise RuntimeError("who is at the other end is not known yet")
        with self._lock:
            self._put(json.dumps(message).encode())
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as that goes now."""
        with self._lock:
            try:
                while self._out and not self.gone:
                    self._out = self._out[self.socket.send(self._out) :]
            except BlockingIOError:
                pass
            except OSError:
                self.gone = True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come since the last call."""
        messages: list[dict[str, Any]] = []
        try:
            while chunk := self.socket.recv(_CHUNK):
                *lines, self._in = (self._in + chunk).split(b"\n")
                for line in lines:
                    messages += self._read(line)
                if len(self._in) > (_MOST if self.known else _MOST_UNKNOWN):
                    raise ValueError("this is no message")
            self.gone = True
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self.gone = True
        self.flush()
        return messages

    def local_address(self) -> str | None:
        """The address of this machine that the connection uses; None where it has ended."""
        try:
            return self.socket.getsockname()[0].removeprefix("::ffff:")  # IPv4, on a socket of both kinds
        except OSError:
            return None

    def close(self) -> None:
        """End the connection."""
        self.gone = True
        self.socket.close()

    def _put(self, data: bytes) -> None:
        """Add a signed line to what is to be sent; the lock is held."""
        self._out += self._signature(self._connects, self._sent, data) + b" " + data + b"\n"
        self._sent += 1

    def _read(self, line: bytes) -> list[dict[str, Any]]:
        """The message of a line, if it has one; ValueError where the line is none of the job's."""
        if not self._key:
            numbers = [self._number, line]
            self._key = signature(self._secret, *(numbers[::-1] if self._connects else numbers))
            with self._lock:
                self._put(b"{}")  # so that the other end knows us, too
            return []
        signed, _, data = line.partition(b" ")
        if not same(signed, self._signature(not self._connects, self._taken, data)):
            raise ValueError("this is no message of the job")
        self._taken += 1
        self.heard = time.monotonic()
        if self.known:
            return [json.loads(data)]
        self.known = True
        return []

    def _signature(self, connects: bool, number: int, data: bytes) -> bytes:
        return signature(self._key, _END[connects], b"%d" % number, data)


def readable(connections: Sequence[Connection], server: socket.socket | None, seconds: float) -> set[socket.socket]:
    """The sockets on which something has come, `server` too; waits for the first up to `seconds`."""
    sockets = [*([server] if server else []), *(connection.socket for connection in connections)]
    return set(wait([one for one in sockets if one.fileno() >= 0], seconds))  # without those that were closed
