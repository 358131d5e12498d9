"""This machine among the hosts."""

from __future__ import annotations

import ipaddress
import socket


def is_this_machine(name: str) -> bool:
    """Whether `name` is one of this machine. Names are compared, not looked up: that can take long, and fail."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        own = socket.gethostname()
        # With and without its domain it is the same machine; with two domains it is not.
        same = name.partition(".")[0] == own.partition(".")[0] and not ("." in name and "." in own)
        return name in ("localhost", own) or same
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
        try:
            probe.bind((name, 0))  # works for addresses of this machine only
        except OSError:
            return False
    return True
