"""The gradient of one unit: from autograd's pieces to a full local buffer to the reduced shard.

Alive at most: the full buffer from the first gradient of a backward until its reduction (longer only where
micro-batches accumulate locally), and the fp32 shard from then until the optimizer has used it. Only where the
shard is the whole gradient (stage 0, or one rank) its memory stays for the next step.
"""

from __future__ import annotations

import torch

from zero.core import comm
from zero.core.comm import Inbox, Transfer
from zero.core.mesh import Mesh
from zero.plan.units import UnitPlan


class Gradients:
    """Collects one unit's gradients on this rank and reduces them over the mesh.

    flat:  the full local gradient [layout.numel], in `dtype`, or None;
    shard: the reduced sum over all ranks and micro-batches so far [layout.numel / shard axis], fp32, or None.
           It is a plain sum: the mean over ranks and micro-batches is taken by the optimizer's one factor.
    """

    def __init__(
        self, plan: UnitPlan, shapes: list[torch.Size], mesh: Mesh, dtype: torch.dtype, device: torch.device, tag: int
    ) -> None:
        self.plan = plan
        self.flat: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self._spans = list(zip(plan.layout.spans.values(), shapes, strict=True))
        self._mesh = mesh
        self._dtype = self._base = dtype
        self._device = device
        self._tag = tag
        self._filled: set[int] = set()  # parameters whose span of `flat` holds a gradient
        self._arrived: set[int] = set()  # parameters that got one in the backward that runs
        # Where gradients are not cut, no memory was promised, and fresh pages at every step cost 3 % of it on a CPU.
        self._kept: torch.Tensor | None = None
        self._inbox: Inbox | None = None
        self._transfer: Transfer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of gradients alive on this rank, kept memory included."""
        held = (self.flat, self.shard, self._kept)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def complete(self) -> bool:
        """Every parameter of the unit got its gradient in the backward that runs."""
        return len(self._arrived) == len(self._spans)

    def take(self, index: int, grad: torch.Tensor) -> None:
        """Add parameter `index`'s gradient (its shape, any dtype) to the flat buffer."""
        if self.flat is None:
            self.flat = self._memory(self.plan.layout.numel, self._dtype)
            for gap in self.plan.layout.gaps:
                self.flat.narrow(0, *gap).zero_()
        span, shape = self._spans[index]
        view = self.flat.narrow(0, *span).view(shape)
        if index in self._filled:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._filled.add(index)
        self._arrived.add(index)

    def local(self, index: int) -> torch.Tensor:
        """Parameter `index`'s part of `flat` as fp32 [numel]: what was not reduced yet; zeros where nothing came."""
        span, _ = self._spans[index]
        if self.flat is None or index not in self._filled:
            return torch.zeros(span.numel, dtype=torch.float32, device=self._device)
        return self.flat.narrow(0, *span).to(torch.float32)

    def collect_in(self, dtype: torch.dtype) -> None:
        """From now on `flat` has this dtype; to be said while there is none, on all ranks: it is what they send."""
        self._dtype = self._base = dtype

    def widen(self) -> None:
        """Micro-batches will add up in `flat` although none were foreseen: fp32 until it is reduced, on all ranks."""
        if self._dtype.itemsize < 4:
            self._dtype = torch.float32
            self.flat = None if self.flat is None else self.flat.to(torch.float32)

    def settle(self) -> None:
        """Reduce what is local now and wait for the sum; collective."""
        self.reduce()
        self.finish()

    def begin_round(self) -> None:
        """A backward has ended: the next one may bring every gradient once more."""
        self._arrived.clear()

    def reduce(self) -> None:
        """Start the reduction of the flat buffer, with zeros where no gradient came, and let go of it."""
        flat = self.flat
        if flat is None:
            flat = torch.zeros(self.plan.layout.numel, dtype=self._dtype, device=self._device)
        else:
            for index, (span, _) in enumerate(self._spans):
                if index not in self._filled:
                    flat.narrow(0, *span).zero_()
        self.flat, self._dtype = None, self._base
        self._filled.clear()
        self._inbox = comm.scatter(flat, self._mesh.reduced_over, self._tag)

    def sum(self) -> None:
        """Wait for the slices and add them up; along the replica axis, start to gather the sums."""
        inbox, self._inbox = self._inbox, None
        if inbox is None:
            return
        if self._mesh.replica.size > 1:
            axis = self._mesh.replica
            total = inbox.flat
            if total.dtype != torch.float32 or total.device != self._device:
                total = self._memory(total.numel(), torch.float32)
            own = total.chunk(axis.size)[axis.rank]
            inbox.sum(own, False)  # returns when our slices have left, so that theirs may be overwritten
            self._transfer = comm.gather(total, axis, self._tag + 1)
        elif self.shard is None and self._mesh.world_size == 1 and inbox.flat.dtype == torch.float32:
            self.shard = inbox.flat
        elif self.shard is None:
            numel = inbox.flat.numel() // self._mesh.shard.size
            self.shard = self._memory(numel, torch.float32)
            inbox.sum(self.shard, False)
        else:
            inbox.sum(self.shard, True)

    def finish(self) -> None:
        """Wait until `shard` holds the sum."""
        self.sum()
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        transfer.wait()
        if self.shard is None:
            self.shard = transfer.full
        else:
            self.shard.add_(transfer.full)

    def drop(self) -> None:
        """Forget every gradient; waits for messages on their way, which still use the buffers."""
        self.finish()
        if self.shard is not None and self._mesh.shard.size == 1:
            self._kept = self.shard
        self.flat = self.shard = None
        self._dtype = self._base
        self._filled.clear()
        self._arrived.clear()

    def forget_memory(self) -> None:
        """Let go of memory that was kept for the next step."""
        self._kept = None

    def _memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized memory on the device: what the last step left, where it fits."""
        kept = self._kept
        if kept is not None and kept.numel() == numel and kept.dtype == dtype:
            self._kept = None
            return kept
        return torch.empty(numel, dtype=dtype, device=self._device)
