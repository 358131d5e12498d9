"""The gradient of one unit: from autograd's pieces to a full local buffer to the reduced shard.

Alive at most: the full buffer from the first gradient of a backward until its reduction (longer only where
micro-batches accumulate locally), and the shard from then until the optimizer has used it. Only where the
shard is the whole gradient (stage 0, or one rank) its memory stays for the next step. Where micro-batches are added
as a tree, there are as many shards as it has open subtrees: at most log2 of the micro-batches, plus one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from zero.core import comm
from zero.core.comm import Inbox, Transfer
from zero.core.mesh import Mesh
from zero.core.tree import Leaf, Partials
from zero.memory.host_gradients import HostGradAccumulator
from zero.plan.units import UnitPlan


class GradientDtypes(NamedTuple):
    """The dtypes of a unit's gradient on its way.

    local:  of the full buffer as gradients land;
    kept:   of whatever adds up: the reduced shard, and the full buffer once a second gradient is added in it;
    travel: what is sent is rounded to it, on every rank its own contribution too; None: to `local`. Over gloo the sum
            is taken in fp32 in the order of ranks, and where gradients are not cut it travels as such.
    """

    local: torch.dtype
    kept: torch.dtype = torch.float32
    travel: torch.dtype | None = None


class Gradients:
    """Collects one unit's gradients on this rank and reduces them over the mesh.

    flat:  the full local gradient [layout.numel], in `dtypes.local` or `dtypes.kept`, or None;
    shard: the reduced sum over all ranks and micro-batches so far [layout.numel / shard axis], in `dtypes.kept`, or
           None. It is a plain sum of what landed: the mean over ranks and micro-batches, the loss scale and clipping
           are taken care of by the optimizer's one factor;
    leaf:  which backward is being reduced; it matters only to the tree;
    rest:  where the reduced sum adds up instead of in the memory of this device, or None.
    """

    def __init__(
        self,
        plan: UnitPlan,
        shapes: list[torch.Size],
        mesh: Mesh,
        dtypes: GradientDtypes,
        device: torch.device,
        tag: int,
    ) -> None:
        self.plan = plan
        self.flat: torch.Tensor | None = None
        self.leaf = Leaf()
        self.rest: HostGradAccumulator | None = None
        self._sum: torch.Tensor | None = None
        self._partials: Partials | None = None  # not None: micro-batches are added as a tree
        self._spans = list(zip(plan.layout.spans.values(), shapes, strict=True))
        self._mesh = mesh
        self._dtypes = self._base = dtypes
        self._device = device
        self._tag = tag
        self._filled: set[int] = set()  # parameters whose span of `flat` holds a gradient
        self._arrived: set[int] = set()  # parameters that got one in the backward that runs
        # Where gradients are not cut, no memory was promised, and fresh pages at every step cost 3 % of it on a CPU.
        self._kept: torch.Tensor | None = None
        self._inbox: Inbox | None = None
        self._transfer: Transfer | None = None

    def sum_as_tree(self) -> None:
        """From now on, add ranks and micro-batches in the order of a fixed tree (zero/core/tree.py)."""
        self._partials = Partials()

    @property
    def shard(self) -> torch.Tensor | None:
        """The reduced sum, see above. Whoever reads it ends the tree: what comes later is added to it as a whole."""
        if self._partials is not None:
            self._sum = self._partials.take(self._sum)
        return self._rested if self._sum is None else self._sum

    @property
    def nbytes(self) -> int:
        """Bytes of gradients alive on this rank, kept memory included; what rests in host memory is not."""
        partials = self._partials.values if self._partials is not None else ()
        held = (self.flat, self._sum, *partials, self._kept)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def reduced(self) -> bool:
        """Whether sums over all ranks are held; unlike a look at `shard`, it ends no tree."""
        return (self.rest is not None and self.rest.has_sum) or bool(self.sums())

    @property
    def squares(self) -> torch.Tensor | None:
        """The sum of the squares of `shard`, fp64 on the device, where that is known because `shard` has left it."""
        away = self.rest is not None and self.rest.has_sum and self._partials is None
        return self.rest.squares if away else None

    @property
    def _rested(self) -> torch.Tensor | None:
        return self.rest.tensor() if self.rest is not None and self.rest.has_sum else None

    @property
    def complete(self) -> bool:
        """Every parameter of the unit got its gradient in the backward that runs."""
        return len(self._arrived) == len(self._spans)

    def take(self, index: int, grad: torch.Tensor, factor: float = 1.0) -> None:
        """Add parameter `index`'s gradient (its shape, any dtype) times `factor` to the flat buffer."""
        if self.flat is None:
            self.flat = self._memory(self.plan.layout.numel, self._dtypes.local)
            for gap in self.plan.layout.gaps:
                self.flat.narrow(0, *gap).zero_()
        span, shape = self._spans[index]
        again = index in self._filled
        if again and self.flat.itemsize < self._dtypes.kept.itemsize:
            self.flat = self.flat.to(self._dtypes.kept)  # from here on it adds up
        view = self.flat.narrow(0, *span).view(shape)
        if again:
            view.add_(grad, alpha=factor)
        else:
            view.copy_(grad)
            if factor != 1.0:
                view.mul_(factor)
            self._filled.add(index)
        self._arrived.add(index)

    def local(self, index: int) -> torch.Tensor:
        """Parameter `index`'s part of `flat` as fp32 [numel]: what was not reduced yet; zeros where nothing came."""
        span, _ = self._spans[index]
        if self.flat is None or index not in self._filled:
            return torch.zeros(span.numel, dtype=torch.float32, device=self._device)
        return self.flat.narrow(0, *span).to(torch.float32)

    def collect_in(self, dtypes: GradientDtypes) -> None:
        """From now on gradients are of these dtypes; to be said while there are none, on all ranks alike."""
        self._dtypes = self._base = dtypes

    def widen(self) -> None:
        """Micro-batches will add up in `flat`, foreseen or not: in `kept` until it is reduced, on all ranks alike."""
        if self._dtypes.local.itemsize < self._dtypes.kept.itemsize:
            self._dtypes = self._dtypes._replace(local=self._dtypes.kept)
            self.flat = None if self.flat is None else self.flat.to(self._dtypes.kept)

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
            flat = torch.zeros(self.plan.layout.numel, dtype=self._dtypes.local, device=self._device)
        else:
            for index, (span, _) in enumerate(self._spans):
                if index not in self._filled:
                    flat.narrow(0, *span).zero_()
        as_tree = self._partials is not None
        if self._mesh.data.size > 1 or as_tree:
            flat = flat.to(self._dtypes.travel or self._dtypes.local)
        self.flat, self._dtypes = None, self._base
        self._filled.clear()
        self._inbox = comm.scatter(flat, self._mesh.data, self._tag, as_tree)

    def sum(self) -> None:
        """Wait for the slices and add them up; along the replica axis, start to gather the sums."""
        inbox, self._inbox = self._inbox, None
        if inbox is None:
            return
        rests = self.rest is not None and self._partials is None  # a tree keeps the sums that are not finished itself
        if self._mesh.replica.size > 1:
            axis = self._mesh.replica
            total = inbox.flat
            if total.dtype != torch.float32 or total.device != self._device or inbox.pairwise:
                total = self._memory(total.numel(), torch.float32)
            own = total.chunk(axis.size)[axis.rank]
            inbox.sum(own, False)  # returns when our slices have left, so that theirs may be overwritten
            self._transfer = comm.gather(total, axis, self._tag + 1)
        elif self._sum is not None and self._partials is None and self._dtypes.kept == torch.float32:
            inbox.sum(self._sum, True)
        elif len(inbox.rows) == 1 and (rests or inbox.rows[0].dtype == self._dtypes.kept):
            inbox.arrive()
            self._hold(inbox.rows[0])
        elif not (rests and self.rest.add_in_place(inbox.sum)):
            numel = inbox.flat.numel() // self._mesh.shard.size
            total = self._memory(numel, torch.float32)
            inbox.sum(total, False)
            self._hold(total)

    def finish(self) -> None:
        """Wait until `shard` holds the sum."""
        self.sum()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()
            self._hold(transfer.full)

    def drop(self) -> None:
        """Forget every gradient; waits for messages on their way, which still use the buffers."""
        self.finish()
        if self._sum is not None and self._mesh.shard.size == 1:
            self._kept = self._sum
        self.flat = self._sum = None
        if self.rest is not None:
            self.rest.clear()
        self._dtypes = self._base
        if self._partials is not None:
            self._partials = Partials()
        self._filled.clear()
        self._arrived.clear()

    def hand_over(self) -> torch.Tensor:
        """The reduced sum, for whoever uses it up; nothing of ours writes into it before `drop` and the next backward.

        What rests in host memory is the storage itself, which the next sum will use: that one must wait.
        """
        total, self._sum = self.shard, None
        return total

    def forget_memory(self) -> None:
        """Let go of memory that was kept for the next step."""
        self._kept = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Few contiguous tensors that are finite exactly where all gradients are that are held here.

        For what was brought to host memory that is one number, so that nobody waits for it or reads it again.
        """
        if self.flat is not None and len(self._filled) == len(self._spans):
            yield self.flat
        elif self.flat is not None:
            for _, part in self._local_parts():
                yield part
        brought = self.rest.squares_added if self.rest is not None else None
        yield from [brought] if brought is not None else self.sums()

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same by parameter: its name, and a contiguous piece [n] of its gradient."""
        if self.flat is not None:
            yield from self._local_parts()
        own = self.plan.layout.shard(self._mesh.shard.rank, self._mesh.shard.size)
        for total in self.sums():
            for fragment in self.plan.layout.fragments(own):
                yield fragment.name, total.narrow(0, fragment.at, fragment.numel)

    def sums(self) -> list[torch.Tensor]:
        """The reduced sum, and those of a tree that is not finished: `shard` would end it."""
        total = self._rested if self._sum is None else self._sum
        held = [] if total is None else [total]
        return held if self._partials is None else [*held, *self._partials.values]

    def _local_parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index in sorted(self._filled):
            yield self.plan.params[index].name, self.flat.narrow(0, *self._spans[index][0])

    def _hold(self, total: torch.Tensor) -> None:
        """Keep a sum over all ranks, or add it to what there is: in fp32, rounded once to what it is kept in."""
        if self._partials is not None:
            self._partials.put(self.leaf, total)
        elif self.rest is not None:
            self.rest.add(total)
        elif self._sum is None:
            self._sum = total.to(self._dtypes.kept)
        else:
            self._sum.add_(total)

    def _memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized memory on the device: what the last step left, where it fits."""
        kept = self._kept
        if kept is not None and kept.numel() == numel and kept.dtype == dtype:
            self._kept = None
            return kept
        return torch.empty(numel, dtype=dtype, device=self._device)
