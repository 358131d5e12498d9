"""A unit: parameters that are gathered, reduced and released together, and that an optimizer updates.

Of `ShardedParams` this rank holds a shard. Three verbs move them through the states of zero/core/param_buffer.py:
`gather` starts to bring the full parameters, `wait` makes them readable, `release` frees their memory. They are made of
parts, each the only owner of its state: `buffer` (the full parameters), `shard` (this rank's slice, its exact values,
where they rest, the update that still runs) and `gathering` (how the full parameters come from other ranks).

A `Unit` adds two verbs: `invalidate`, called before the optimizer changes the parameters, and `reduce`, which handles
the gradient and is legal in every state; and one part, `gradients`. This file has the order in which the parts act.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zero.core import comm
from zero.core.gathering import Gathering, Policy, exactly
from zero.core.gradients import GradientDtypes, Gradients
from zero.core.initial_values import initial_values, share_equal, share_quant_state
from zero.core.late_gather import LateGather
from zero.core.mesh import Mesh
from zero.core.owner import Owner
from zero.core.param_buffer import ParamBuffer, State
from zero.core.shard import Shard
from zero.core.torch_private import untransformed
from zero.memory.state_placement import StatePlacement
from zero.plan.layout import Span
from zero.plan.units import UnitPlan

TAGS = 3  # of one unit: its gather, the scatter of its gradient, the gather of its sum


class ShardedParams:
    """Parameters with one flat buffer and one shard.

    mesh:       the ranks that share them, their own: units of one engine may have different ones;
    index:      their place on this rank; number: one that all ranks of the mesh know them by, by default the index;
    holds:      how many readers (`GatheredParameters`) keep them full for now;
    edited:     indices of the parameters that such readers will write back, one entry for each reader;
    persistent: they stay full between uses although they are cut, until the optimizer's step outdates the full copy;
    on_read:    called when they are read while they are released; makes them full and returns True, or False;
    late:       whether the gather behind a step may stay in flight.
    """

    def __init__(
        self,
        plan: UnitPlan,
        buffer: ParamBuffer,
        index: int,
        mesh: Mesh,
        placement: StatePlacement,
        number: int | None = None,
    ) -> None:
        self.plan = plan
        self.index = index
        self.mesh = mesh
        self.buffer = buffer
        window = plan.layout.shard(mesh.shard.rank, mesh.shard.size)
        self.shard = Shard(window, placement, buffer, mesh.data.size > 1)
        self.number = index if number is None else number
        self.gathering = Gathering(mesh, self.shard, buffer, TAGS * self.number)
        self.holds = 0
        self.edited: list[int] = []
        self.persistent = False
        self.on_read: Callable[[ShardedParams], bool] | None = None
        self._source = self.gathering  # of what is in the full buffer, or on its way there
        self._transfer: Any = None  # in flight; has `wait`
        self.late = LateGather(buffer)

    @property
    def params(self) -> list[nn.Parameter]:
        """The module's own parameters."""
        return self.buffer.params

    @property
    def resharded(self) -> bool:
        """Whether parameters exist in full only while they are used."""
        return self.buffer.resharded

    @property
    def state(self) -> State:
        """Where the parameters are."""
        return self.buffer.state

    @property
    def readable(self) -> bool:
        """Whether the full parameters are there for everybody to read."""
        return self.state is State.FULL and self.shard.pending is None

    def gather(self, deferred: bool = False, gathering: Gathering | None = None) -> None:
        """Start to bring the full parameters; a no-op when they are there or in flight.

        With `deferred`, a running update is not waited for: on this rank the gather then begins with the next call
        after the update, or in `wait`, which every path goes through, since other ranks may have begun theirs and
        need this rank's part. `gathering`: the way they come if it begins now; None: the usual one.
        """
        if deferred and self.shard.updating:
            with self.buffer.lock:
                if self.state is State.SHARDED and not self.persistent:  # others are sent by the update
                    self.buffer.move("request")
            return
        self.shard.settle_for(self.shard.placement.streams.gathers)  # who reads them waits for both, in `wait`
        if self.state is State.AWAY:
            raise self.absence()
        self.send(gathering=gathering)

    def gather_exact(self) -> None:
        """As `gather`, but of exact values where ranks compute with those of 8 bits, until the release; collective.

        Values that were decoded before are replaced, which is waited for.
        """
        exact = self.gathering.exact
        self.gather(gathering=exact)
        if self._source is not exact:
            self.wait()
            self._keep_writes()
            with self.shard.placement.streams.gathers.after_current():
                self._begin(exact, exact.room())
            self._wait_transfer()

    @untransformed
    def send(self, after_update: bool = False, gathering: Gathering | None = None) -> None:
        """Start the gather, unless the parameters are there or in flight, even if an update still runs.

        `after_update`: the caller is the update of this unit, which has published what it wrote.
        """
        placement, gathering = self.shard.placement, gathering or self.gathering
        streams = placement.streams
        with self.buffer.lock:
            if self.state not in (State.SHARDED, State.REQUESTED, State.STALE):
                return
            with placement.events.span("gather", self.plan.name):
                if self.resharded:
                    self.buffer.allocate()  # not on a side stream: memory is reused in the order of its own stream
                room = gathering.room()
                if after_update:  # its copy to the device may still be queued, and the gather is to send that
                    streams.gathers.wait(streams.up.record_event())
                with streams.gathers.after_current():
                    self._begin(gathering, room)
                self.buffer.move("gather")

    @untransformed
    def wait(self) -> None:
        """Block until the full parameters may be read; a no-op when they are."""
        while not self.readable:
            self.shard.settle()  # without the lock, which the update needs to send what it has written
            with self.buffer.lock:
                if self.shard.pending is not None:
                    continue  # the loop has begun another step while this thread waited
                if self.state is State.REQUESTED:
                    self.send()
                if self.state is State.CONCEALED:
                    self.buffer.move("reveal")
                elif self.state is not State.FULL:
                    self._wait_transfer()
                    self.buffer.move("wait")
                    if self.resharded:
                        self.buffer.show()
                self.buffer.look_full()

    def complete(self) -> None:
        """All of the full buffer was filled, this rank's part too, without a gather."""
        self.shard.settle()
        with self.buffer.lock:
            self.shard.wait_filled()
            self.buffer.move("complete")
            if self.resharded:
                self.buffer.show()
            self.buffer.look_full()

    def release(self, keep_if_referenced: bool = True) -> None:
        """Free the memory of the full parameters, where parameters are resharded; else they stay.

        With `keep_if_referenced`, memory of which a view was taken since it was filled stays with that view, and the
        unit takes new memory next time. A graph's views do not count: they must find the parameters again where they
        were, so who builds a graph passes False. Memory that cannot be resized, as after `numpy()` and
        `share_memory_()`, always stays; a graph finds the values in it.
        """
        if not self.persistent:
            self._release(keep_if_referenced)

    def conceal(self) -> None:
        """Keep the memory, but have the parameters look released, so that a read is noticed."""
        if self.resharded and self.state is State.FULL and not (self.persistent or self.holds):
            self._keep_writes()
            with self.buffer.lock:
                self.buffer.look_released()
                self.buffer.move("conceal")

    @property
    def coming(self) -> bool:
        """Whether a read only has to wait, for an update that runs and what a step has sent: no rank need do more."""
        sent = self.persistent and (self.shard.pending is not None or self.state is State.GATHERING)
        return sent or (not self.resharded and self.state is not State.AWAY)

    def ensure_gathered(self) -> bool:
        """Make the parameters readable for an immediate read; False if that is not possible."""
        if self.coming:
            self.wait()
        return self.state is State.FULL or (self.on_read is not None and self.on_read(self))

    def absence(self) -> RuntimeError | None:
        """The error to raise where the values were sent to host memory; None where they are here."""
        if self.state is State.AWAY:
            return RuntimeError(f"the states of {self.buffer.name} are offloaded; call engine.reload_states() first")
        return None

    # -- what readers and loads write

    def take_writes(self) -> None:
        """Where parameters are not resharded: take what users have written into them in place as their exact values."""
        if self.resharded:
            return
        if self.state is not State.AWAY:
            self.wait()  # for an update that still runs
            self.shard.take_writes()
        elif self.shard.master is not None:
            raise self.absence()

    def snapshot(self, index: int) -> torch.Tensor | None:
        """A copy of this rank's part of parameter `index`, by which `overwrite` finds later what has changed."""
        return self.shard.snapshot(index)

    def overwrite(self, index: int, source: int, before: torch.Tensor | None = None) -> None:
        """Replace parameter `index` by its value on rank `source` of `mesh.data`: full copy, shard and master.

        A collective. With `before`, elements that still have the values of that `snapshot` keep their exact masters.
        """
        comm.broadcast(self.buffer.views[index], source, self.mesh.data, self.plan.name)
        self.shard.take(index, before)
        self.gathering.invalidate()

    def renew(self, index: int, values: torch.Tensor) -> None:
        """Take `values` [numel], in the unit's dtype, as parameter `index` in the full copy, where there is one.

        Shard and master hold them already. Autograd is told, so that a graph built before raises, as in plain torch.
        """
        self.shard.settle()
        if self.state in (State.REQUESTED, State.GATHERING):
            self.wait()
        if self.state in (State.FULL, State.CONCEALED):
            self.buffer.views[index].view(-1).copy_(values)
        else:
            self.buffer.forget_graph()
        if not (self.holds and self.state is State.FULL):  # GatheredParameters would take it for a change that is lost
            self.buffer.outdate([index])
        self.gathering.invalidate()

    def _begin(self, gathering: Gathering, room: torch.Tensor) -> None:
        self._source, self._transfer = gathering, gathering.begin(room)

    def _wait_transfer(self) -> None:
        self.shard.wait_filled()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()
        if self.late.loop is not None:
            self.late.received()

    @untransformed
    def _release(self, keep_if_referenced: bool) -> None:
        if not self.resharded or self.holds or self.state in (State.SHARDED, State.AWAY):
            return
        with self.shard.placement.events.span("release", self.plan.name):
            self.wait()  # messages in flight still write into the buffer
            self._keep_writes()
            with self.buffer.lock:
                self.buffer.free(keep_if_referenced)

    def _keep_writes(self) -> None:
        """Before the full copy goes: take what a forward has written into it."""
        if self.shard.keep_writes(self._source.decoded_shard):
            self.gathering.refresh_from_full()


class Unit(ShardedParams):
    """Parameters with one flat buffer, one shard, one gradient.

    optimizer: returns the optimizer that updates it, or None; weak, because parameters outlive engines; engine: so too;
    left_by:   the `ShardedModule` that owned it, if that was dropped without giving the parameters back.
    """

    def __init__(
        self,
        plan: UnitPlan,
        params: Sequence[nn.Parameter],
        index: int,
        number: int,
        mesh: Mesh,
        resharded: bool,
        placement: StatePlacement,
    ) -> None:
        resharded = resharded and (mesh.shard.size > 1 or placement.shard_offloaded)
        super().__init__(
            plan, ParamBuffer(plan, params, resharded, mesh.data.global_rank), index, mesh, placement, number
        )
        self.gradients: Gradients | None = None
        self.optimizer: Callable[[], Any] = lambda: None  # until one is bound
        self.engine: Callable[[], Any] = lambda: None
        self.left_by: Any = None

    @property
    def span(self) -> Span:
        """The part of its shard that this rank counts in norms and writes to checkpoints, as a span of the buffer."""
        return self.mesh.counted_span(self.plan.layout)

    def counted(self, values: torch.Tensor) -> torch.Tensor:
        """The part of the shard's values [n] that lies in `span`; the other replicas count the rest."""
        part = values.chunk(self.mesh.replica.size)[self.mesh.replica.rank]
        return part if self.mesh.counts else part[:0]

    @property
    def stays_full(self) -> bool:
        """Whether the full parameters stay between uses: only the optimizer's step outdates them."""
        return self.persistent or not self.resharded

    def adopt(
        self,
        dtype: torch.dtype,
        device: torch.device,
        gradient_dtypes: GradientDtypes,
        remainder: bool = False,
        gathered: Policy = exactly,
    ) -> None:
        """Move the parameters into flat storage, with rank 0's values, and keep this rank's shard.

        The masters are made from the values before they are rounded to a 16-bit `dtype`; see `initial_values`.
        `gathered`: how parameters are gathered from now on.
        """
        trained = self.plan.requires_grad
        share_quant_state(self.params, self.mesh.data, self.plan.name)
        share_equal(self.params, self.plan, self.mesh.peers)
        full, master = initial_values(self.params, self.plan, self.mesh, self.shard.window, dtype, device, remainder)
        self.buffer.adopt(full)
        self.shard.adopt(trained, master)
        self.gathering = gathered(self.mesh, self.shard, self.buffer, TAGS * self.number)
        self._source = self.gathering
        for position, param in enumerate(self.params):
            param._zero_owner = Owner(self.plan.params[position].name, self, position)
        if trained:
            shapes = [param.shape for param in self.params]
            how = self.mesh.summed, gradient_dtypes, device, TAGS * self.number + 1, self.shard.placement
            self.gradients = Gradients(self.plan, shapes, *how)
        if not self.resharded:
            self.buffer.note_references()

    # -- the optimizer's step, and the parameters around it

    def publish(self, after_update: bool = False) -> None:
        """The shard was updated: start to send it to the ranks that need it before its next use."""
        if self.stays_full:
            self.send(after_update)
        elif not self.shard.placement.streamed:  # else with the gather, which waits for the stream of the update
            self.gathering.publish()

    def absence(self) -> RuntimeError | None:
        """See `ShardedParams.absence`; so too while the optimizer's state is in host memory."""
        if getattr(self.optimizer(), "away", False):
            return RuntimeError(f"the states of {self.buffer.name} are offloaded; call engine.reload_states() first")
        return super().absence()

    def step_ends(self) -> None:
        """The gather behind a step has begun: wait for it, unless whoever reads the parameters will."""
        looks_released = self.resharded or self.shard.pending is not None
        if not (looks_released or self.late.step_ends()):
            self.wait()

    def wait_sent(self) -> None:
        """Wait until the other ranks have received what the last update sent."""
        self.shard.settle()
        if self.state is State.GATHERING and self.stays_full:
            self.wait()

    def invalidate(self) -> None:
        """The shard is about to change: a full copy must be gathered again, and no reader may hold it.

        Autograd is told, so that a graph built before the change raises, as in plain torch. What the user has written
        into parameters is taken into the masters first.
        """
        self.shard.settle()
        if self.resharded:
            self.buffer.forget_graph()
            self._release(True)
            self.buffer.outdate()
            self.gathering.invalidate()
        else:
            self.take_writes()
            self.buffer.outdate()
            with self.buffer.lock:
                self.late.step_begins()
                self.buffer.move("invalidate")

    def offload(self) -> None:
        """Parameters and shard must not be read until `reload`; their storages may be freed in between."""
        if self.holds:
            raise RuntimeError(f"unit '{self.plan.name}' is held open by GatheredParameters; leave that block first")
        self.shard.settle()
        self.buffer.forget_graph()
        self._release(True)
        self.take_writes()
        with self.buffer.lock:
            self.buffer.offload()

    def write_exact(self, start: int, values: torch.Tensor) -> None:
        """Replace the exact values from element `start` of the shard on by `values`, fp32 [k], and their roundings."""
        self.shard.write_exact(start, values)
        self.gathering.invalidate()

    def reduce(self, leaf: Any = None) -> None:
        """Start to reduce the full gradient to its shard, after a running update has finished with the last one."""
        self.shard.settle()
        with self.shard.placement.events.span("reduce", self.plan.name):
            self.gradients.reduce(leaf)

    def dissolve(self, alone: bool = False) -> None:
        """Give every parameter storage of its own again, with its current value, and forget the flat buffers.

        `alone`: without the other ranks. What only they hold, or have not sent, becomes NaN (0 in dtypes without one).
        """
        if alone:
            self._stand_alone()
        else:
            self.gather_exact()
            self.wait()
        self.buffer.dissolve()
        if self.gradients is not None:
            self.gradients.drop()
        self.shard.wait_copies()
        self.shard.placement.close()

    def _stand_alone(self) -> None:
        """Become readable with what is on this rank; messages in flight are not waited for."""
        transfer, self._transfer = self._transfer, None
        with self.buffer.lock:
            if self.state in (State.SHARDED, State.REQUESTED):
                self.buffer.allocate()
                self.shard.fill_alone()
            elif self.state is State.GATHERING and not (transfer is None or transfer.done):
                self.shard.fill_alone()  # it has old values and new ones
        if self.state not in (State.FULL, State.CONCEALED):
            self.complete()
        self.wait()


# Reading order, 3 of 9; next: zero/core/prefetcher.py, when units are gathered and released.
