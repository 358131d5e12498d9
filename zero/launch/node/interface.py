"""The network interface that has an address of this machine."""

from __future__ import annotations

IFNAME = "GLOO_SOCKET_IFNAME"


def interface(address: str | None) -> str | None:
    """The name of the interface that has `address`; None where there is none, or where only this machine is on it."""
    import psutil

    if address is None:
        return None
    plain = _plain(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(_plain(one.address) == plain for one in addresses):
            return None if _plain(addresses[0].address).startswith("127.") or plain == "::1" else name
    return None


def _plain(address: str) -> str:
    """`address` without its scope, and as IPv4 where it stands for such a one."""
    return address.partition("%")[0].removeprefix("::ffff:")
