"""The shard of one unit and the exact values behind it, kept in step with what the optimizer and users write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from zero.core.master import Master
from zero.core.param_buffer import ParamBuffer
from zero.core.state import State
from zero.core.tensors import different
from zero.kernels.marks import Changes
from zero.memory.pending_update import PendingUpdate
from zero.memory.state_placement import StatePlacement
from zero.memory.streams import SideStream, record_event, wait_event
from zero.plan.layout import Fragment, Span


class MasterSync:
    """Owner of a unit's shard, of its master, and of the update of both that may still run.

    shard:   this rank's slice [window.numel] of the parameters: a view of the full buffer unless they are cut;
    master:  the exact values of that slice, for the optimizer; None when the unit is frozen;
    window:  the slice, as a span of the full buffer;
    pending: the update of the last step, while it may run beside the training loop, or None. It is set by the loop, and
             cleared under the lock of the buffer by whichever thread has waited for it;
    changes: what has changed of the shard since somebody asked; None: nobody does.
    """

    def __init__(self, window: Span, placement: StatePlacement, buffer: ParamBuffer, shared: bool) -> None:
        """`shared`: other ranks have parts of the same unit."""
        self.shard: torch.Tensor | None = None
        self.master: Master | None = None
        self.window = window
        self.pending: PendingUpdate | None = None
        self.changes: Changes | None = None
        self._placement = placement
        self._buffer = buffer
        self._shared = shared
        self._filled: torch.cuda.Event | None = None  # after it the own part of the full buffer is there
        self._copied: torch.cuda.Event | None = None  # after it what was published is in host memory

    def adopt(self, trained: bool, tensor: torch.Tensor | None) -> None:
        """Keep the shard of the full buffer, and if `trained` a master with `tensor` beside the shard; see `Master`."""
        own = self.own_part()
        self.shard = self._placement.keep_shard(own) if self._buffer.cut else own
        if trained:
            tensor = None if tensor is None else tensor.to(self._placement.update_device)
            self.master = Master(self._placement.shard_for_master(own, self.shard), tensor)
            self._placement.keep_state(self.master.shard, self.master.tensor)

    def watch_changes(self) -> Changes:
        """Note from now on what changes, in what is returned."""
        self.changes = Changes(self.window.numel, self._placement.update_device)
        return self.changes

    def own_part(self) -> torch.Tensor:
        """The shard's place in the full buffer [window.numel]."""
        return self._buffer.full.narrow(0, *self.window)

    def fill(self) -> None:
        """Start to copy the shard to its place in the full buffer, from wherever it rests, on the current stream."""
        with self._span("copy", self._placement.shard_offloaded):
            self._filled = self._placement.read_shard(self.shard, self.own_part())

    def wait_filled(self) -> None:
        """Have the current stream wait for that copy."""
        wait_event(self._filled, self._buffer.full.device)

    @property
    def updating(self) -> bool:
        """Whether an update of the shard runs beside the training loop at this moment."""
        pending = self.pending
        return pending is not None and not pending.future.done()

    def defer(self, pending: PendingUpdate) -> None:
        """An update of the shard runs. Where parameters are not cut they look released until it is over.

        They do not where another thread has waited for them in the meantime.
        """
        with self._buffer.lock:
            self.pending = pending
            if self._buffer.state in (State.STALE, State.GATHERING) and not self._buffer.cut:
                self._buffer.look_released()

    def settle(self) -> None:
        """Wait until no update of the shard runs any more; raises what it raised, and again each time."""
        while (pending := self.pending) is not None:
            with self._span("wait update", self.updating):
                wait_event(self._end_of(pending), self._buffer.full.device)
            with self._buffer.lock:
                if self.pending is pending:  # while one thread waited, another may have begun the next update
                    self.pending = None

    def settle_for(self, stream: SideStream) -> None:
        """As `settle`, for what `stream` does from now on; the current one need not wait for that yet."""
        if (pending := self.pending) is not None:
            stream.wait(self._end_of(pending))

    def _end_of(self, pending: PendingUpdate) -> torch.cuda.Event | None:
        if pending.forked and (self._shared or not pending.future.done()):
            raise RuntimeError(
                f"{self._buffer.name} was being updated when this process was forked, and what it waits for comes "
                "in the parent process only; read the parameters there, before the fork"
            )
        return pending.result()

    def abandon_update(self) -> None:
        """No update runs any more; one that has failed will not be heard of again."""
        if self.pending is not None and self.pending.future.exception() is None:
            self.settle()
        self.pending = None

    @contextlib.contextmanager
    def acquired(self, changed: bool = False, step: bool = False, in_update: bool = False) -> Iterator[None]:
        """Inside, shard, master and moments may be read, and written if `changed`, wherever they rest.

        `step`: as in `StatePlacement.acquired`; `in_update`: the caller is the update, which does not wait for itself.
        """
        if not in_update:
            self.settle()
        if not (in_update and self._placement.queued):  # whose copies are in an order of their own
            self.wait_copies()
        if self.changes is not None and changed and not step:
            self.changes.all = True
        with self._placement.acquired(changed, step):
            yield

    def wait_copies(self) -> None:
        """Wait until no copy between device and host reads or writes the shard in host memory any more.

        Of what is on the device only, the current stream waits, and not the host.
        """
        if self._placement.shard_offloaded or self._placement.updated_on_host:
            for event in (self._filled, self._copied):
                if event is not None:
                    event.synchronize()
        else:
            self.wait_filled()
        self._copied = None

    def publish(self, start: int = 0, numel: int | None = None) -> None:
        """Have the shard show what was written to the master, from element `start` on."""
        part = slice(start, None if numel is None else start + numel)
        with self._span("copy", self._placement.shard_copied):
            if self._placement.publish(self.master.shard, self.shard, part):
                self._copied = record_event(self._buffer.full.device)

    def _span(self, verb: str, does: bool) -> contextlib.AbstractContextManager[None]:
        return self._placement.events.span(verb, self._buffer.plan.name) if does else contextlib.nullcontext()

    def exact(self) -> torch.Tensor:
        """The masters of this rank's shard as fp32 [n]; to be read only."""
        with self.acquired():
            values = self.master.values()
            return values if self._placement.state_store.resident else values.clone()

    def write_exact(self, start: int, values: torch.Tensor) -> None:
        """Replace the exact values from element `start` of the shard on by `values`, fp32 [k], and their roundings."""
        with self.acquired(changed=True):
            self.master.write(start, values.to(self._placement.update_device))
            self.publish(start, values.numel())

    def take_writes(self) -> None:
        """Where parameters are not cut: take what users have written into them in place as their exact values.

        It is seen by autograd's version counters, which `param.data` goes around: a write through that reaches an
        fp32 master never, one that is kept as remainders at once. Each rank looks at its own shard, so all ranks
        must write the same. Where parameters are cut, only GatheredParameters can write them; it calls `take`.
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

    def keep_writes(self, shown: Callable[[], torch.Tensor] | None = None) -> bool:
        """Where parameters are cut: before the full copy goes, take what a forward has written into it; whether it did.

        shown: gives what stood in the own part [window.numel], where that was not the shard.

        As where they are not cut, each rank takes its own part, so all ranks must write the same. `nn.Embedding` with
        `max_norm` writes so, and momentum encoders do. Writes through `param.data` in place are not seen.
        """
        buffer = self._buffer
        written = buffer.reattach_all() | buffer.written()
        if not written:
            return False
        own, before = self.own_part(), None if shown is None else shown()
        with self.acquired(changed=True):
            for index in sorted(written):
                fragment = self.fragment(index)
                part = slice(fragment.at, fragment.at + fragment.numel)
                self._take(fragment, own[part], None if before is None else before[part])
        buffer.note_versions()
        return True

    def snapshot(self, index: int) -> torch.Tensor:
        """What this rank's shard says of parameter `index` now, for `take` to tell later what has changed."""
        fragment = self.fragment(index)
        with self.acquired():
            part = self.shard.narrow(0, fragment.at, fragment.numel)
            # Where parameters are not cut, they are the shard: a write reaches it at once.
            unchanging = self._buffer.cut and self._placement.shard_store.resident
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
        part = self.shard.narrow(0, fragment.at, fragment.numel)
        values = values.to(part.device)
        changed = None if everywhere else different(values, part if before is None else before)
        if self._buffer.cut:
            part.copy_(values if before is None else torch.where(changed, values, part))
        self._follow(fragment, changed)

    def _follow(self, fragment: Fragment, where: torch.Tensor | None = None) -> None:
        """Somebody wrote this part of the shard (bool `where`: only those elements): take it as exact."""
        if self.master is None:
            return
        part = slice(fragment.at, fragment.at + fragment.numel)
        self._placement.follow_shard(self.master.shard, self.shard, part)
        self.master.follow(
            fragment.at, fragment.numel, None if where is None else where.to(self._placement.update_device)
        )
