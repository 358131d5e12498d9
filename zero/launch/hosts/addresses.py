"""Names, addresses, interfaces and ports of this machine."""

from __future__ import annotations

import ipaddress
import socket

INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable that says which interface gloo listens at


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


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def port_problem(port: int) -> str | None:
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
        addresses = {info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    address = addresses.pop()
    # Debian has a machine take its own name for an address of the loopback, which other hosts do not.
    if addresses or (address != name and ipaddress.ip_address(address).is_loopback) or not is_this_machine(address):
        return None
    return address


def interface(address: str | None) -> str | None:
    """The name of the interface that has `address`; None where there is none, or where only this machine is on it."""
    name = None if address is None else _having(address)
    return None if name == loopback() else name


def loopback() -> str | None:
    """The name of the interface that only this machine is on."""
    return _having("127.0.0.1")


def _having(address: str) -> str | None:
    import psutil

    wanted = _plain(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(_plain(one.address) == wanted for one in addresses):
            return name
    return None


def _plain(address: str) -> str:
    """`address` without its scope, and as IPv4 where it stands for such a one."""
    return address.partition("%")[0].removeprefix("::ffff:")
