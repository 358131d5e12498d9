"""The shard of one unit, with the exact values behind it, where both rest, and the update of both that may still run.

Values are written from three sides: the optimizer's step, users who write parameters in place, and loads. The shard
keeps the rounded values, the exact ones, and their copies in other memories in step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from zero.core.master import Master
from zero.core.param_buffer import ParamBuffer, State
from zero.core.released import absent
from zero.kernels.marks import Changes
from zero.log import logger
from zero.memory.pending_update import PendingUpdate
from zero.memory.state_placement import StatePlacement
from zero.memory.streams import Event, SideStream, record_event, wait_event
from zero.plan.layout import Fragment, Span


class Shard:
    """This rank's slice of one unit's parameters, with its exact values.

    values:    the slice [window.numel]: a view of the full buffer unless parameters are resharded;
    master:    the exact values of the slice, for the optimizer; None when the unit is frozen;
    window:    the slice, as a span of the full buffer;
    placement: where values, master and gradient rest;
    pending:   the update of the last step, while it may run beside the training loop, or None. The loop sets it; the
               thread that has waited for it clears it, under the lock of the buffer;
    changes:   which values have changed since they were last asked for; None where nobody asks.
    """

    def __init__(self, window: Span, placement: StatePlacement, buffer: ParamBuffer, shared: bool) -> None:
        """`shared`: other ranks have parts of the same unit."""
        self.values: torch.Tensor | None = None
        self.master: Master | None = None
        self.window = window
        self.placement = placement
        self.pending: PendingUpdate | None = None
        self.changes: Changes | None = None
        self._buffer = buffer
        self._shared = shared
        self._filled: Event | None = None  # after it this rank's part of the full buffer is filled
        self._copied: Event | None = None  # after it what was published is in host memory

    def adopt(self, trained: bool, tensor: torch.Tensor | None) -> None:
        """Keep the shard of the full buffer, and if `trained` a master with `tensor` beside the shard; see `Master`."""
        own, placement = self.own_part(), self.placement
        self.values = own
        if self._buffer.resharded:
            self.values = own.to(placement.shard_device, copy=True)
            placement.shard_store.put([self.values])
        if trained:
            tensor = None if tensor is None else tensor.to(placement.update_device)
            copied = placement.shard_copied  # of `own`: what is in a file already cannot be read here
            self.master = Master(own.to(placement.update_device, copy=True) if copied else self.values, tensor)
            beside = [] if self.master.tensor is self.master.shard else [self.master.tensor]
            placement.state_store.put([self.master.shard, *beside] if copied else beside)

    def watch_changes(self) -> Changes:
        """Note from now on what changes, in what is returned."""
        self.changes = Changes(self.window.numel, self.placement.update_device)
        return self.changes

    def own_part(self) -> torch.Tensor:
        """The shard's place in the full buffer [window.numel]."""
        return self._buffer.full.narrow(0, *self.window)

    def fill(self) -> None:
        """Start to copy the shard, from wherever it rests, to its place in the full buffer, on the current stream."""
        placement = self.placement
        resting = None if placement.shard_store.resident else placement.shard_store
        with self._span("copy", placement.shard_offloaded):
            if resting is not None:
                with self._span("wait read", True):
                    resting.acquire()
            self.own_part().copy_(self.values, non_blocking=True)
            self._filled = record_event(self._buffer.full.device)
            if resting is not None:  # its memory is used again: not before the copy, which is only queued, has ended
                resting.write_back(changed=False, after=self._filled)

    def fill_alone(self) -> None:
        """Have the own part in the full buffer, and NaN for what only other ranks hold (0 in dtypes without one)."""
        full, own = self._buffer.full, None if self._buffer.resharded else self.values.clone()
        full.copy_(absent(full.shape, full.dtype, full.device))
        if own is not None:
            self.values.copy_(own)
            return
        try:
            self.fill()
        except (OSError, RuntimeError) as error:
            logger.warning("the own part of %s could not be read either: %s", self._buffer.name, error)

    def wait_filled(self) -> None:
        """Have the current stream wait for that copy."""
        wait_event(self._filled, self._buffer.full.device)

    @property
    def updating(self) -> bool:
        """Whether an update of the shard runs beside the training loop at this moment."""
        pending = self.pending
        return pending is not None and not pending.ended

    def defer(self, pending: PendingUpdate) -> None:
        """An update of the shard runs. Where parameters are not resharded they look released until it is over.

        They do not where another thread has waited for them in the meantime.
        """
        with self._buffer.lock:
            self.pending = pending
            if self._buffer.state in (State.STALE, State.GATHERING) and not self._buffer.resharded:
                self._buffer.look_released()

    def settle(self) -> None:
        """Wait until no update of the shard runs; raises the error of a failed one, each time."""
        while (pending := self.pending) is not None:
            with self._span("wait update", self.updating):
                wait_event(self._end_of(pending), self._buffer.full.device)
            with self._buffer.lock:
                if self.pending is pending:  # while one thread waited, another may have begun the next update
                    self.pending = None

    def settle_for(self, stream: SideStream) -> None:
        """As `settle`, but only `stream` waits; the current stream does not have to yet."""
        if (pending := self.pending) is not None:
            stream.wait(self._end_of(pending))

    def _end_of(self, pending: PendingUpdate) -> Event | None:
        if pending.forked and (self._shared or not pending.ended):
            raise RuntimeError(
                f"{self._buffer.name} was being updated when this process was forked, and what it waits for comes "
                "in the parent process only; read the parameters there, before the fork"
            )
        return pending.result()

    def abandon_update(self) -> None:
        """Wait until no update runs, and forget a failed one."""
        if self.pending is not None:
            self.pending.wait()
            if self.pending.error is None:
                self.settle()
        self.pending = None

    def fetch(self) -> bool:
        """Begin to read values that rest in a file; False where memory for it, or an update, must be waited for."""
        if self.updating:
            return False
        self.settle()
        return self.placement.shard_store.fetch()

    @contextlib.contextmanager
    def acquired(self, changed: bool = False, step: bool = False, in_update: bool = False) -> Iterator[None]:
        """Inside, shard, master and moments may be read, and written if `changed`, wherever they rest.

        `step`: as in `StatePlacement.acquired`; `in_update`: the caller is the update, which does not wait for itself.
        """
        if not in_update:
            self.settle()
        if not (in_update and self.placement.queued):  # whose copies are in an order of their own
            self.wait_copies()
        if self.changes is not None and changed and not step:
            self.changes.all = True
        with self.placement.acquired(changed, step):
            yield

    def wait_copies(self) -> None:
        """Wait until no copy between device and host reads or writes the shard in host memory any more.

        Of what is on the device only, the current stream waits, and not the host.
        """
        if self.placement.shard_offloaded or self.placement.updated_on_host:
            for event in (self._filled, self._copied):
                if event is not None:
                    event.synchronize()
        else:
            self.wait_filled()
        self._copied = None

    def publish(self, start: int = 0, numel: int | None = None) -> None:
        """Round what was written to the master, from element `start` on, into the shard."""
        placement = self.placement
        if not placement.shard_copied:
            return
        part = slice(start, None if numel is None else start + numel)
        with self._span("copy"):
            # A buffer of a file may belong to another unit as soon as it is written back.
            at_once = not (placement.resident or placement.queued)
            self.values[part].copy_(self.master.shard[part], non_blocking=not at_once)
            if placement.shard_offloaded != placement.updated_on_host:  # the stream still copies
                self._copied = record_event(self._buffer.full.device)

    def nbytes(self) -> tuple[int, int]:
        """Bytes on the device beside the full buffer: of the values; of the master with its copy of them."""
        values = self.values.nbytes if self._buffer.resharded and not self.placement.shard_offloaded else 0
        if self.master is None or self.placement.state_offloaded:
            return values, 0
        return values, self.master.nbytes + (self.master.shard.nbytes if self.placement.shard_copied else 0)

    def _span(self, verb: str, does: bool = True) -> contextlib.AbstractContextManager[None]:
        return self.placement.events.span(verb, self._buffer.plan.name) if does else contextlib.nullcontext()

    def write_exact(self, start: int, values: torch.Tensor) -> None:
        """Replace the exact values from element `start` of the shard on by `values`, fp32 [k], and their roundings."""
        with self.acquired(changed=True):
            self.master.write(start, values.to(self.placement.update_device))
            self.publish(start, values.numel())

    def take_writes(self) -> None:
        """Where parameters are not resharded: take what users have written into them in place as their exact values.

        It is seen by autograd's version counters, which `param.data` goes around: a write through that reaches an
        fp32 master never, one that is kept as remainders at once. Each rank looks at its own shard, so all ranks
        must write the same. Where parameters are resharded, only GatheredParameters can write them; it calls `take`.
        """
        buffer = self._buffer
        buffer.reattach_all()
        written = buffer.written() if self.master is not None else ()
        if written:
            with self.acquired(changed=True):
                for index in written:
                    self._follow(self.fragment(index))
        if self.master is not None:
            buffer.note_versions()

    def keep_writes(self, decoded: Callable[[], torch.Tensor | None]) -> bool:
        """Take what a forward has written into resharded parameters, before the full copy goes; whether it did.

        decoded: gives what stood in the own part [window.numel]; None: the shard's values.

        As where they are not cut, each rank takes its own part, so all ranks must write the same. `nn.Embedding` with
        `max_norm` writes so, and momentum encoders do. Writes through `param.data` in place are not seen.
        """
        buffer = self._buffer
        written = buffer.reattach_all() | buffer.written()
        if not written:
            return False
        own, before = self.own_part(), decoded()
        with self.acquired(changed=True):
            for index in sorted(written):
                fragment = self.fragment(index)
                part = slice(fragment.at, fragment.at + fragment.numel)
                self._take(fragment, own[part], None if before is None else before[part])
        buffer.note_versions()
        return True

    def snapshot(self, index: int) -> torch.Tensor:
        """A copy of this rank's part of parameter `index`, by which `take` finds later what has changed."""
        fragment = self.fragment(index)
        with self.acquired():
            part = self.values.narrow(0, fragment.at, fragment.numel)
            # Where parameters are not resharded, they are the shard: a write reaches it at once.
            unchanging = self._buffer.resharded and self.placement.shard_store.resident
            return part if unchanging else part.clone()

    def take(self, index: int, before: torch.Tensor | None = None) -> None:
        """Take what stands in the full buffer as the exact value of parameter `index`.

        With `before`, elements that still have those values keep their exact masters.
        """
        fragment = self.fragment(index)
        values = self._buffer.views[index].reshape(-1).narrow(0, fragment.start, fragment.numel)
        with self.acquired(changed=True):
            self._take(fragment, values, before, everywhere=before is None)
        self._buffer.note_versions([index])

    def fragment(self, index: int) -> Fragment:
        """The part of parameter `index` that lies in this rank's shard."""
        return self._buffer.plan.layout.fragment(self._buffer.plan.params[index].name, self.window)

    def _take(
        self, fragment: Fragment, values: torch.Tensor, before: torch.Tensor | None, everywhere: bool = False
    ) -> None:
        """Have `values` in the shard; masters follow where these differ from `before` (the shard itself if None)."""
        part = self.values.narrow(0, fragment.at, fragment.numel)
        values = values.to(part.device)
        changed = None if everywhere else _different(values, part if before is None else before)
        if self._buffer.resharded:
            part.copy_(values if before is None else torch.where(changed, values, part))
        self._follow(fragment, changed)

    def _follow(self, fragment: Fragment, where: torch.Tensor | None = None) -> None:
        """This part of the shard was written (bool `where`: only those elements): take it as exact."""
        if self.master is None:
            return
        part = slice(fragment.at, fragment.at + fragment.numel)
        if self.placement.shard_copied:
            self.master.shard[part].copy_(self.values[part])
        self.master.follow(
            fragment.at, fragment.numel, None if where is None else where.to(self.placement.update_device)
        )


def _different(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where the bits of two tensors [n] of one dtype differ, bool [n]; a NaN is equal to itself."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return one.contiguous().view(bits) != other.contiguous().view(bits)
