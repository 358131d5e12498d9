"""One connection between the launchers of two hosts: signed messages, and an error where the other end falls silent.

Both ends first send a random number as a line of its own. A key is made of both numbers and the job's secret, and every
line after that is a signature and a message in JSON; the signature covers the key, which end it is and the number of
the line. So each line is worth something only once, at its place, and in this connection. Nothing of the job is sent
before the first such line of the other end has shown that it has the secret.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import threading
from typing import Any

from zero.launch.contract import SILENCE, signature

CUT = (OSError, ValueError)
"""What `greet` and `receive` raise: TimeoutError for silence, ValueError for what is no message of the job."""
_MOST = 1 << 22  # bytes of one message; what sends more is no launcher
_MOST_UNKNOWN = 1 << 10  # the same before it has shown that it has the secret
_END = (b"one", b"other")  # who was connected to, and who connected


class Connection:
    """A connection on which one thread receives, and any thread may send.

    connects: whether this end is the one that has connected. secret: of the job, "" for none.
    """

    def __init__(self, peer: socket.socket, secret: str, connects: bool) -> None:
        peer.settimeout(SILENCE)
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer = peer
        self._lines = peer.makefile("rb")
        self._secret = secret.encode(errors="surrogateescape")
        self._connects = connects
        self._key = b""
        self._sent = self._taken = 0  # signed lines
        self._lock = threading.Lock()

    def greet(self) -> None:
        """Show that this end has the secret, and wait until the other end has; before this nothing is to be sent."""
        own = os.urandom(16).hex().encode()
        self._peer.sendall(own + b"\n")
        other = self._line(_MOST_UNKNOWN)
        self._key = signature(self._secret, *((other, own) if self._connects else (own, other)))
        self.send()
        self._message(self._line(_MOST_UNKNOWN))

    def send(self, **message: Any) -> None:
        """Send `message`. Where the connection has ended that is lost: it is `receive` that says so."""
        data = json.dumps(message).encode()
        with self._lock, contextlib.suppress(OSError):
            self._peer.sendall(self._signature(self._connects, self._sent, data) + b" " + data + b"\n")
            self._sent += 1

    def receive(self) -> dict[str, Any]:
        """The next message, waited for."""
        return self._message(self._line(_MOST))

    def local_address(self) -> str:
        """The address of this machine that the connection uses."""
        return self._peer.getsockname()[0].removeprefix("::ffff:")  # IPv4, on a socket of both kinds

    def close(self) -> None:
        """End the connection; a `receive` that waits in another thread ends, too."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()

    def _line(self, most: int) -> bytes:
        line = self._lines.readline(most)
        if not line.endswith(b"\n"):
            raise ValueError("the connection has ended, or this is no message")
        return line[:-1]

    def _message(self, line: bytes) -> dict[str, Any]:
        signed, _, data = line.partition(b" ")
        if not hmac.compare_digest(signed, self._signature(not self._connects, self._taken, data)):
            raise ValueError("this is no message of the job")
        self._taken += 1
        return json.loads(data)

    def _signature(self, connects: bool, number: int, data: bytes) -> bytes:
        return signature(self._key, _END[connects], b"%d" % number, data)
