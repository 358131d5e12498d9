"""Ports for the tests, which nobody takes between the look for one and its use."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that nobody listens on, of those that the system gives to no connection by itself."""
    # What it gives for port 0 it may give to any connection of this machine the moment it is free again.
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    draw = random.Random(os.urandom(8))  # tests seed the usual one, all alike
    for _ in range(100):
        port = draw.randrange(min(10_000, end // 2), end)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise RuntimeError("no free port was found")
