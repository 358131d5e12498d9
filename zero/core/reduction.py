"""The sum of one unit's gradient over its mesh, on its way: along the shard axis, the replica axis, or both.

Along shard every rank gets the sum of its own slice. Along replica, where every rank wants all of it, each first sums a
part and then all parts are gathered, which moves what a ring all-reduce does. Where both axes are larger than one
(HSDP; MiCS, Zhang et al. 2022), each rank's slice is summed along shard first and the slices along replica after, so
that only 1/shard of the gradient crosses between replicas.

The sums are taken in the order of ranks, as a binary tree over them, or in the backend's own order: see comm.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero.core import comm
from zero.core.accumulator import DeviceAccumulator
from zero.core.comm import Axis, Inbox, Transfer
from zero.core.mesh import Mesh
from zero.kernels.wire import encode
from zero.memory.host_gradients import HostGradAccumulator
from zero.plan.formats import wire_nbytes

Accumulator = DeviceAccumulator | HostGradAccumulator
Memory = Callable[[int, torch.dtype], torch.Tensor]  # uninitialized, [numel], on the unit's device


class ShardReduction:
    """Every rank's slice is summed on that rank, straight into the accumulator where it can take it."""

    def __init__(self, flat: torch.Tensor, axis: Axis, tag: int, as_tree: bool, memory: Memory) -> None:
        self._inbox: Inbox | None = comm.scatter(flat, axis, tag, as_tree)
        self._memory = memory

    def advance(self, into: Accumulator, later: int = 2) -> None:
        """Wait for the messages of the present stage, and begin the next one; does nothing in the last one.

        `later`: how many units (1 or 2) have begun their reduction since. Gradients that are cut are given up as early
        as can be. Others stay anyway, so their messages have two units' time: ranks are never quite in step.
        """
        inbox, self._inbox = self._inbox, None
        if inbox is None or into.add_rows(inbox):
            return
        total = self._memory(inbox.numel, torch.float32)
        inbox.sum(total, False)
        into.add(total)

    def finish(self, into: Accumulator) -> None:
        """Wait until `into` has the sum."""
        self.advance(into)

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors in memory for it now, perhaps views of the same: those that become the sum, and all others."""
        return [], _messages(self._inbox)


class ReplicaReduction:
    """Each rank sums a part of the whole, and the parts are gathered along `axis`.

    sums_over: the ranks whose parts are summed, where these are more than those that want the sum: then the whole is
    what a rank's shard is of `flat`.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        axis: Axis,
        tag: int,
        as_tree: bool,
        memory: Memory,
        sums_over: Axis | None = None,
    ) -> None:
        self._axis = axis
        self._tag = tag
        self._memory = memory
        self._device, self._in_place = flat.device, sums_over is None
        self._inbox: Inbox | None = comm.scatter(flat, sums_over or axis, tag, as_tree)
        self._transfer: Transfer | None = None

    def advance(self, into: Accumulator, later: int = 2) -> None:
        if later < 2:
            return
        inbox, self._inbox = self._inbox, None
        if inbox is None:
            return
        total = inbox.flat
        if total.dtype != torch.float32 or total.device != self._device or inbox.pairwise or not self._in_place:
            total = self._memory(inbox.numel * self._axis.size, torch.float32)
        own = total.chunk(self._axis.size)[self._axis.rank]
        inbox.sum(own, False)  # returns when our slices have left, so that theirs may be overwritten
        self._transfer = comm.gather(total, self._axis, self._tag + 1)

    def finish(self, into: Accumulator) -> None:
        self.advance(into)
        transfer, self._transfer = self._transfer, None
        if transfer is not None:  # None where an exception has ended the first stage
            transfer.wait()
            into.add(transfer.full)

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self._transfer is not None:
            return [self._transfer.full], []
        inbox = self._inbox
        stays = inbox is not None and inbox.flat.dtype == torch.float32 and not inbox.pairwise and self._in_place
        return [self._inbox.flat] if stays else [], _messages(self._inbox)


class HierarchicalReduction:
    """The rank's slice is summed along shard, that sum along replica, in fp32."""

    def __init__(self, flat: torch.Tensor, mesh: Mesh, tag: int, as_tree: bool, memory: Memory) -> None:
        self._replica = mesh.replica
        self._tag = tag
        self._as_tree = as_tree
        self._memory = memory
        self._inbox: Inbox | None = comm.scatter(flat, mesh.shard, tag, as_tree)
        self._between: ReplicaReduction | None = None

    def advance(self, into: Accumulator, later: int = 2) -> None:
        if self._between is not None:
            self._between.advance(into)
            return
        inbox, self._inbox = self._inbox, None
        if inbox is None:  # an exception has ended this stage
            return
        total = self._memory(inbox.numel, torch.float32)
        inbox.sum(total, False)
        self._between = ReplicaReduction(total, self._replica, self._tag, self._as_tree, self._memory)

    def finish(self, into: Accumulator) -> None:
        if self._between is None:
            self.advance(into)
        if self._between is not None:
            self._between.finish(into)

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return ([], _messages(self._inbox)) if self._between is None else self._between.tensors()


def _messages(inbox: Inbox | None) -> list[torch.Tensor]:
    return [] if inbox is None else [inbox.flat, *inbox.rows]


Reduction = ShardReduction | ReplicaReduction | HierarchicalReduction


def reduce(flat: torch.Tensor, mesh: Mesh, tag: int, as_tree: bool, memory: Memory) -> Reduction:
    """Begin to sum `flat` [layout.numel] over the mesh; it belongs to the reduction from now on."""
    if mesh.replica.size == 1:
        return ShardReduction(flat, mesh.shard, tag, as_tree, memory)
    if mesh.shard.size == 1:
        return ReplicaReduction(flat, mesh.replica, tag, as_tree, memory)
    if as_tree and not mesh.nested:  # the tree is over neighbours first, and those are in different shard groups
        flat = mesh.by_place(flat.view(mesh.data.size, -1)).view(-1)
        return ReplicaReduction(flat, mesh.replica, tag, as_tree, memory, mesh.data)
    return HierarchicalReduction(flat, mesh, tag, as_tree, memory)


class ErrorFeedback:
    """Encodes one unit's local gradients [n] in 8 bits (ZeRO++'s qgZ, Wang et al. 2023, section 3.3).

    A gradient is encoded together with the error of the one before, which each rank keeps, in 8 bits as well (error
    feedback: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Xie et al., "LoCo", 2024). The messages of all
    ranks (zero/kernels/wire.py) are decoded and added in fp32, in the order of ranks.
    """

    def __init__(self, numel: int, parts: int, device: torch.device) -> None:
        """`parts`: ranks that each get an equal part of a message."""
        self._parts = parts
        self._error = torch.zeros(wire_nbytes(numel), dtype=torch.uint8, device=device)  # which reads as zeros

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        """The message of `flat` [n], of any floating dtype, and of the error that is left."""
        return encode(flat, parts=self._parts, error=self._error)

    def forget(self) -> None:
        """The last gradient came to nothing."""
        self._error.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of the error."""
        return self._error.nbytes
