"""Ports of this machine."""

from __future__ import annotations

import socket


def problem(port: int) -> str | None:
    """Why nobody can listen on `port` of this machine; None where it is free."""
    with socket.socket() as probe:
        # As torch's store does it: a port that an ended run left in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.strerror
    return None
