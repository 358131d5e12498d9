"""Ports of this machine."""

from __future__ import annotations

import ipaddress
import socket

from zero.launch.hosts.machine import is_this_machine


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


def own_address(name: str) -> str | None:
    """The one address of this machine that `name` stands for, here and elsewhere; None where that cannot be told."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    address = found.pop()
    # Debian has a machine take its own name for an address of the loopback, which other hosts do not.
    if found or (address != name and ipaddress.ip_address(address).is_loopback) or not is_this_machine(address):
        return None
    return address
