"""hpZ: a second copy of the parameters, cut over the ranks of one node only (ZeRO++, Wang et al. 2023, section 3.2).

State is cut over all ranks. After each update a rank brings, once, the slices that its place in the node stands for
from the ranks with the same place in other nodes; every gather until the next update then stays inside the node.
"""

from __future__ import annotations

import torch

from zero.core import comm
from zero.core.comm import Transfer
from zero.core.mesh import Mesh


class SecondaryShard:
    """One unit's secondary shard: the slices [nodes, n] of the full buffer [nodes, ranks of a node, n].

    values: flat [nodes * n], in the dtype of the parameters; there, or on their way, where `fresh`.
    """

    def __init__(self, mesh: Mesh, full: torch.Tensor) -> None:
        """From a full buffer that is valid."""
        self._inside, self._across = mesh.secondary, mesh.across
        self.values = torch.empty(full.numel() // self._inside.size, dtype=full.dtype, device=full.device)
        self._transfer: Transfer | None = None
        self.fresh = False
        self.copy_from(full)

    def copy_from(self, full: torch.Tensor) -> None:
        """The full buffer is valid, and equal on all ranks: take our slices from it."""
        self.values.view(self._across.size, -1).copy_(self._slices(full))
        self.fresh = True

    def invalidate(self) -> None:
        """The shards of all ranks change."""
        self._wait()
        self.fresh = False

    def send(self, shard: torch.Tensor, tag: int) -> None:
        """Start to bring the slices from the other nodes; `shard` is ours."""
        self.values.view(self._across.size, -1)[self._across.rank].copy_(shard)
        self._transfer = comm.gather(self.values, self._across, tag)
        self.fresh = True

    def gather(self, full: torch.Tensor, tag: int) -> Transfer:
        """Start to fill `full` from the secondary shards of the node."""
        self._wait()
        self._slices(full).copy_(self.values.view(self._across.size, -1))
        return comm.gather(full, self._inside, tag, rows=self._across.size)

    def _slices(self, full: torch.Tensor) -> torch.Tensor:
        return full.view(self._across.size, self._inside.size, -1)[:, self._inside.rank]

    def _wait(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()
