"""The network interface that has an address of this machine."""

from __future__ import annotations

IFNAME = "GLOO_SOCKET_IFNAME"


def interface(address: str | None) -> str | None:
    """The name of the interface that has `address`; None where there is none, or where only this machine is on it."""
    found = None if address is None else _having(address)
    return None if found == loopback() else found


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
