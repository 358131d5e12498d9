"""The gradient of one unit: from autograd's pieces to a full local buffer to the reduced shard.

Alive at most: the full buffer from the first gradient of a backward until its reduction (longer only where
micro-batches accumulate locally), and the shard from then until the optimizer has used it. Only where the
shard is the whole gradient (stage 0, or one rank) its memory stays for the next step. Where micro-batches are added
as a tree, there are as many shards as it has open subtrees: at most log2 of the micro-batches, plus one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from zero.core.accumulator import DeviceAccumulator, TreeAccumulator
from zero.core.mesh import Mesh
from zero.core.reduction import Accumulator, ErrorFeedback, Reduction, reduce
from zero.core.torch_private import add_each, copy_each, multiply_each, zero_each
from zero.core.tree import Leaf
from zero.kernels.bucket import pack
from zero.memory.host_gradients import HostGradAccumulator
from zero.memory.state_placement import StatePlacement
from zero.plan.memory import TOGETHER
from zero.plan.units import UnitPlan


class GradientDtypes(NamedTuple):
    """The dtypes of a unit's gradient on its way.

    local:  of the full buffer as gradients land;
    kept:   of whatever adds up: the reduced shard, and the full buffer once a second gradient is added in it;
    travel: what is sent is rounded to it, on every rank its own contribution too; None: to `local`. Over gloo the sum
            is taken in fp32 in the order of ranks, and where gradients are not sharded it travels as such.
    """

    local: torch.dtype
    kept: torch.dtype = torch.float32
    travel: torch.dtype | None = None


class Gradients:
    """Collects one unit's gradients on this rank and reduces them over the mesh.

    flat: the full local gradient [layout.numel], in `dtypes.local` or `dtypes.kept`, or None;
    sum:  adds up what was reduced over all ranks [layout.numel / shard axis], in `dtypes.kept`. It is a plain sum of
          what landed: the mean over ranks and micro-batches, the loss scale and clipping are taken care of by the
          optimizer's one factor;
    feedback: encodes what is sent in 8 bits, or None.
    """

    def __init__(
        self,
        plan: UnitPlan,
        shapes: list[torch.Size],
        mesh: Mesh,
        dtypes: GradientDtypes,
        device: torch.device,
        tag: int,
        placement: StatePlacement,
    ) -> None:
        """`placement`: says whether the reduced sum adds up on this device, and has the stream of reductions."""
        self.plan = plan
        self._flat: torch.Tensor | None = None
        self.sum: Accumulator = placement.host_gradients or DeviceAccumulator(dtypes.kept)
        self.feedback: ErrorFeedback | None = None
        self._spans = list(zip(plan.layout.spans.values(), shapes, strict=True))
        self._mesh = mesh
        self._dtypes = self._base = dtypes
        self._device = device
        self._placement = placement
        self._tag = tag
        self._filled: set[int] = set()  # parameters whose span of `flat` holds a gradient
        self._arrived: set[int] = set()  # parameters that got one in the backward that runs
        self._waiting: dict[int, torch.Tensor] = {}  # gradients that are not in `flat` yet, by parameter
        self._waiting_nbytes, self._factor = 0, 1.0  # of those
        # Where gradients are not sharded, no memory was promised, and fresh pages cost 3 % of each step on a CPU.
        self._kept: torch.Tensor | None = None
        self._reduction: Reduction | None = None

    def sum_as_tree(self) -> None:
        """From now on, add ranks and micro-batches in the order of a fixed tree (zero/core/tree.py)."""
        self.sum = TreeAccumulator(self._base.kept)

    def quantize(self) -> None:
        """From now on 8 bits travel along the shard axis, where there is one."""
        if self._mesh.shard.size > 1:
            self.feedback = ErrorFeedback(self.plan.layout.numel, self._mesh.shard.size, self._device)

    @property
    def shard(self) -> torch.Tensor | None:
        """The reduced sum, see above. Reading it ends the tree: what comes later is added to it as a whole."""
        return self.sum.total()

    @property
    def nbytes(self) -> int:
        """Bytes of gradients alive on this rank, kept memory included; what rests in host memory is not."""
        reduced = () if isinstance(self.sum, HostGradAccumulator) else self.sum.parts()
        return self.error_nbytes + sum(
            tensor.nbytes for tensor in (self.flat, self._kept, *reduced) if tensor is not None
        )

    @property
    def error_nbytes(self) -> int:
        """Bytes of what the next gradient brings along."""
        return 0 if self.feedback is None else self.feedback.nbytes

    def alive_nbytes(self, collects: bool) -> tuple[int, int]:
        """Bytes of sums, and bytes on their way to one: local gradients, and messages.

        `collects`: micro-batches add up in `flat`, which counts as a sum then, as it does where it becomes one.
        """
        stays, moving = ([], []) if self._reduction is None else self._reduction.tensors()
        alone = self._mesh.data.size == 1 and self._dtypes.kept == torch.float32 and not self.sum.held
        if collects or (alone and moving and moving[0].dtype == torch.float32):
            stays = moving[:1]  # the local sums, as they are sent; of one rank they are the sum
        reduced = [] if isinstance(self.sum, HostGradAccumulator) else self.sum.parts()
        sums = [*stays, *reduced, *(tensor for tensor in (self._kept,) if tensor is not None)]
        if self.flat is not None:
            in_place = self._mesh.shard.size == 1 and self.flat.dtype == self._dtypes.kept == torch.float32
            (sums if collects or in_place else moving).append(self.flat)
        held, more = nbytes_of(sums), nbytes_of(moving)
        return self.error_nbytes + sum(held.values()), sum(nbytes for at, nbytes in more.items() if at not in held)

    @property
    def reduced(self) -> bool:
        """Whether sums over all ranks are held; unlike a look at `shard`, it ends no tree."""
        return self.sum.held

    @property
    def travelling(self) -> bool:
        """Whether a reduction has begun that was not waited for yet."""
        return self._reduction is not None

    @property
    def complete(self) -> bool:
        """Every parameter of the unit got its gradient in the backward that runs."""
        return len(self._arrived) == len(self._spans)

    @property
    def flat(self) -> torch.Tensor | None:
        """See the class; with all that has come."""
        self._pack()
        return self._flat

    def take(self, index: int, grad: torch.Tensor, factor: float = 1.0) -> None:
        """Add parameter `index`'s gradient (its shape, any dtype) times `factor` to the flat buffer.

        With `param.grad` a view of the buffer beforehand, autograd would add to zeros, which must be written first:
        twice the traffic of this copy, and a launch for each parameter.
        """
        self._arrived.add(index)
        if grad.nbytes > TOGETHER:
            self._move({index: grad}, factor)
        else:
            if index in self._waiting or factor != self._factor or self._waiting_nbytes + grad.nbytes > TOGETHER:
                self._pack()
            self._waiting[index], self._factor = grad, factor
            self._waiting_nbytes += grad.nbytes
        if self.complete:
            self._pack()

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
            self._flat = None if self.flat is None else self.flat.to(self._dtypes.kept)

    def settle(self) -> None:
        """Reduce what is local now and wait for the sum; collective."""
        self.reduce()
        self.finish()

    def begin_round(self) -> None:
        """A backward has ended: the next one may bring every gradient once more."""
        self._pack()
        self._arrived.clear()

    def reduce(self, leaf: Leaf | None = None) -> None:
        """Start the reduction of the flat buffer, with zeros where no gradient came, and let go of it.

        `leaf`: which backward is being reduced, where that is another one than before; it matters only to the tree.
        """
        flat = self.flat
        if flat is None:
            flat = torch.zeros(self.plan.layout.numel, dtype=self._dtypes.local, device=self._device)
        elif missing := set(range(len(self._spans))) - self._filled:
            zero_each([flat.narrow(0, *self._spans[index][0]) for index in missing])
        as_tree = isinstance(self.sum, TreeAccumulator)
        if as_tree and leaf is not None:
            self.sum.leaf = leaf
        if self.feedback is not None:
            flat = self.feedback.encode(flat)
        elif self._mesh.data.size > 1 or as_tree:
            flat = flat.to(self._dtypes.travel or self._dtypes.local)
        self._flat, self._dtypes = None, self._base
        self._filled.clear()
        # After all that fills `flat` on this stream, which goes on with the backward while the message travels.
        with self._placement.streams.reductions.after_current():
            self._reduction = reduce(flat, self._mesh, self._tag, as_tree, self._memory)

    def advance(self, later: int) -> None:
        """Go on with the reduction, `later` units (1 or 2) having begun theirs since."""
        if self._reduction is not None:
            with self._adding():
                self._reduction.advance(self.sum, later)

    def finish(self) -> None:
        """Wait until `shard` holds the sum."""
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            with self._adding():
                reduction.finish(self.sum)

    @contextlib.contextmanager
    def _adding(self) -> Iterator[None]:
        placement = self._placement  # what this stream queues next may read the sum, and so runs after it
        with placement.events.span("sum", self.plan.name), placement.streams.reductions.before_current():
            yield

    def drop(self) -> None:
        """Forget every gradient; waits for messages on their way, which still use the buffers."""
        self.finish()
        memory = self.sum.clear()
        if memory is not None and self._mesh.shard.size == 1:
            self._kept = memory
        self._flat, self._waiting, self._waiting_nbytes = None, {}, 0
        self._dtypes = self._base
        self._filled.clear()
        self._arrived.clear()

    def forget_error(self) -> None:
        """Drop the rounding error of the last gradient, which came to nothing: it must not be sent with the next."""
        if self.feedback is not None:
            self.feedback.forget()

    def forget_memory(self) -> None:
        """Let go of memory that was kept for the next step."""
        self._kept = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Few contiguous tensors that are finite exactly where all gradients are that are held here."""
        if self.flat is not None and len(self._filled) == len(self._spans):
            yield self.flat
        elif self.flat is not None:
            for _, part in self._local_parts():
                yield part
        yield from self.sum.finite_as()

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The shard by parameter: its name, and a contiguous piece [n] of its gradient."""
        if self.flat is not None:
            yield from self._local_parts()
        own = self.plan.layout.shard(self._mesh.shard.rank, self._mesh.shard.size)
        for total in self.sum.parts():
            for fragment in self.plan.layout.fragments(own):
                yield fragment.name, total.narrow(0, fragment.at, fragment.numel)

    def _pack(self) -> None:
        if self._waiting:
            waiting, self._waiting, self._waiting_nbytes = self._waiting, {}, 0
            self._move(waiting, self._factor)

    def _move(self, grads: dict[int, torch.Tensor], factor: float) -> None:
        """Add gradients, by parameter, to the flat buffer: by a kernel in one pass, where it gives torch's bits."""
        if self._flat is None:
            self._flat = self._memory(self.plan.layout.numel, self._dtypes.local)
            if gaps := self.plan.layout.gaps:
                zero_each([self._flat.narrow(0, *gap) for gap in gaps])
        again = grads.keys() & self._filled
        if again and self._flat.itemsize < self._dtypes.kept.itemsize:
            self._flat = self._flat.to(self._dtypes.kept)  # from here on it adds up
        if again and not self._packed(again, grads, factor, add=True):
            add_each(self._views(again), self._as_flat([grads[index] for index in again]), alpha=factor)
        if first := grads.keys() - again:
            if not self._packed(first, grads, factor, add=False):
                copy_each(self._views(first), [grads[index] for index in first])
                if factor != 1.0:
                    multiply_each(self._views(first), factor)
            self._filled |= first

    def _packed(self, indices: Iterable[int], grads: dict[int, torch.Tensor], factor: float, add: bool) -> bool:
        """Move these by one compiled pass, where there is one; whether it was done."""
        offsets = [self._spans[index][0][0] for index in indices]
        return pack([grads[index] for index in indices], self._flat, offsets, factor, add)

    def _views(self, indices: Iterable[int]) -> list[torch.Tensor]:
        return [self._flat.narrow(0, *span).view(shape) for span, shape in (self._spans[index] for index in indices)]

    def _as_flat(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """In the dtype of the flat buffer: several tensors of another would be added by a launch each."""
        if len(grads) == 1 or grads[0].dtype == self._flat.dtype:
            return grads
        room = self._flat.new_empty(sum(grad.numel() for grad in grads)).split([grad.numel() for grad in grads])
        wide = [part.view(grad.shape) for part, grad in zip(room, grads, strict=True)]
        copy_each(wide, grads)
        return wide

    def _local_parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index in sorted(self._filled):
            yield self.plan.params[index].name, self.flat.narrow(0, *self._spans[index][0])

    def _memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized memory on the device: what the last step left, where it fits."""
        kept = self._kept
        if kept is not None and kept.numel() == numel and kept.dtype == dtype:
            self._kept = None
            return kept
        return torch.empty(numel, dtype=dtype, device=self._device)


def nbytes_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of the storages of these tensors, each once, by address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


# Reading order, 6 of 9; next: zero/core/reducer.py, gradients as they land, and the order of reductions.
