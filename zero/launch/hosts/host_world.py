"""Who runs where: the hosts of a job, their devices, and the ranks that follow from them."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from zero.launch.hosts.devices import numbered
from zero.launch.launch_messages import LaunchError


@dataclass(frozen=True)
class Host:
    """One machine: a process for each of `devices`, in this order.

    A device is what CUDA_VISIBLE_DEVICES would call it: a number, or the name of a GPU or of a part of one.
    """

    name: str
    devices: tuple[str, ...]


@dataclass(frozen=True)
class HostWorld:
    """The hosts of a job. Ranks go over the first host's devices, then over the second's, and so on.

    Hosts need not have equally many devices: a rank's place is looked up, never computed by a division.
    """

    hosts: tuple[Host, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.counts)

    @property
    def counts(self) -> list[int]:
        """The number of ranks on each host."""
        return [len(host.devices) for host in self.hosts]

    def ranks(self, node: int) -> range:
        """The ranks of the host number `node`."""
        first = sum(len(host.devices) for host in self.hosts[:node])
        return range(first, first + len(self.hosts[node].devices))

    def node(self, name: str) -> int:
        """The number of the host called `name`."""
        for node, host in enumerate(self.hosts):
            if host.name == name:
                return node
        raise LaunchError(f"host {name!r} is not one of the job's: {', '.join(host.name for host in self.hosts)}")

    def environment(self, node: int, local: int, master_addr: str, master_port: int) -> dict[str, str]:
        """What tells a host's process number `local` who it is; the same variables as under torchrun."""
        ranks = self.ranks(node)
        return {
            "RANK": str(ranks[local]),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
        }

    def encode(self) -> str:
        """One word for a command line, of letters, digits, "-", "_" and "=", so that no shell touches it."""
        hosts = [
            [host.name, len(host.devices) if host.devices == numbered(len(host.devices)) else host.devices]
            for host in self.hosts
        ]
        return base64.urlsafe_b64encode(json.dumps(hosts, separators=(",", ":")).encode()).decode()


def decode(text: str) -> HostWorld:
    """The world that `HostWorld.encode` wrote. Raises LaunchError."""
    try:
        hosts = [(name, devices) for name, devices in json.loads(base64.urlsafe_b64decode(text))]
    except (TypeError, ValueError):
        raise LaunchError(f"--world: got {text!r}, which only the launcher writes; say --num_gpus N") from None
    return HostWorld(
        tuple(Host(name, numbered(devices) if isinstance(devices, int) else tuple(devices)) for name, devices in hosts)
    )
