"""A unit: parameters that are gathered, reduced and released together.

Four verbs move its parameters through the states of zero/core/state.py: `gather` starts to bring the full parameters,
`wait` makes them readable, `release` gives their memory back, `invalidate` says that the optimizer is about to change
them. `reduce` concerns the gradient and is legal in every state.

A unit is made of parts, each the only owner of its state: `buffer` (the full parameters), `shard` (this rank's slice,
its exact values, where they rest, the update that still runs), `gradients`, and `gathering` (how the full parameters
come from other ranks). The unit has the order in which they act.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zero.core import comm
from zero.core.gathering import Gathering, make_gathering
from zero.core.gradients import GradientDtypes, Gradients
from zero.core.initial_values import initial_values, share_beside, share_equal
from zero.core.mesh import Mesh
from zero.core.owner import Owner
from zero.core.param_buffer import ParamBuffer
from zero.core.released import absent
from zero.core.shard import Shard
from zero.core.state import State
from zero.core.torch_private import untransformed
from zero.log import logger
from zero.memory.state_placement import StatePlacement
from zero.plan.layout import Span
from zero.plan.units import UnitPlan

TAGS = 3  # of one unit: its gather, the scatter of its gradient, the gather of its sum


class Unit:
    """Parameters with one flat buffer, one shard, one gradient.

    mesh:       the ranks that share it, its own: units of one engine may have different ones;
    mean:       makes averages of the sums of its gradients over these ranks and the micro-batches of a step;
    holds:      how many readers (`GatheredParameters`) keep it full for now;
    edited:     indices of the parameters that such readers will write back, one entry for each reader;
    persistent: stays full between uses although it is cut: only the optimizer's step takes its full copy away;
    on_read:    called when somebody reads parameters that are released; makes the unit full and returns True, or False;
    optimizer:  gives the optimizer that updates it, or None; weak, because parameters outlive engines;
    left_by:    the `ShardedModule` that it belongs to, once that was dropped without giving the parameters back.
    """

    buffer_class: type[ParamBuffer] = ParamBuffer

    def __init__(
        self,
        plan: UnitPlan,
        params: Sequence[nn.Parameter],
        index: int,
        mesh: Mesh,
        cut: bool,
        placement: StatePlacement,
    ) -> None:
        self.plan = plan
        self.index = index
        self.mesh = mesh
        self.mean = 1.0
        cut = cut and (mesh.shard.size > 1 or placement.shard_offloaded)
        self.buffer = self.buffer_class(plan, params, cut, mesh.data.global_rank)
        window = plan.layout.shard(mesh.shard.rank, mesh.shard.size)
        self.shard = Shard(window, placement, self.buffer, mesh.data.size > 1)
        self.gradients: Gradients | None = None
        self.gathering = Gathering(mesh, self.shard, self.buffer, TAGS * index)
        self.holds = 0
        self.edited: list[int] = []
        self.persistent = False
        self.on_read: Callable[[Unit], bool] | None = None
        self.optimizer: Callable[[], Any] = lambda: None  # until one is bound
        self.left_by: Any = None
        self._source = self.gathering  # of what is in the full buffer, or on its way there
        self._transfer: Any = None  # has `wait`

    @property
    def params(self) -> list[nn.Parameter]:
        """The module's own parameters."""
        return self.buffer.params

    @property
    def cut(self) -> bool:
        """Whether parameters exist in full only while they are used."""
        return self.buffer.cut

    @property
    def stays_full(self) -> bool:
        """Whether the full parameters stay between uses: only the optimizer's step outdates them."""
        return self.persistent or not self.cut

    @property
    def state(self) -> State:
        """Where the parameters are."""
        return self.buffer.state

    @property
    def span(self) -> Span:
        """The part of its shard that this rank counts in norms and writes to checkpoints, as a span of the buffer."""
        return self.mesh.counted_span(self.plan.layout)

    def counted(self, values: torch.Tensor) -> torch.Tensor:
        """Those of the shard's values [n] that lie in the `span`; the other replicas count the others."""
        part = values.chunk(self.mesh.replica.size)[self.mesh.replica.rank]
        return part if self.mesh.counts else part[:0]

    def adopt(
        self,
        dtype: torch.dtype,
        device: torch.device,
        gradient_dtypes: GradientDtypes,
        remainder: bool = False,
        quantized: bool = False,
    ) -> None:
        """Move the parameters into flat storage, with rank 0's values, and keep this rank's shard.

        The masters are made from the values before they are rounded to a 16-bit `dtype`; see `initial_values`.
        `quantized`: from now on parameters are gathered in 8 bits.
        """
        trained = self.plan.requires_grad
        share_beside(self.params, self.mesh.data, self.plan.name)
        share_equal(self.params, self.plan, self.mesh.beside)
        full, master = initial_values(self.params, self.plan, self.mesh, self.shard.window, dtype, device, remainder)
        self.buffer.adopt(full)
        self.shard.adopt(trained, master)
        self.gathering = make_gathering(self.mesh, self.shard, self.buffer, TAGS * self.index, quantized)
        self._source = self.gathering
        for position, param in enumerate(self.params):
            param._zero_owner = Owner(self.plan.params[position].name, self, position)
        if trained:
            shapes = [param.shape for param in self.params]
            tag = TAGS * self.index + 1
            self.gradients = Gradients(self.plan, shapes, self.mesh, gradient_dtypes, device, tag, self.shard.placement)

    # -- the parameters

    def gather(self, deferred: bool = False, gathering: Gathering | None = None) -> None:
        """Start to bring the full parameters; a no-op when they are there or on their way.

        With `deferred`, an update that runs is not waited for. On this rank the gather then begins with the next call
        after the update, or in `wait`, which every way out of it goes through: others may have begun it, and get
        their part. `gathering`: how they come, where it begins now; None: as they always do.
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
        """As `gather`, of the values themselves where all compute with what 8 bits say, until the release; collective.

        What was decoded is replaced, which is waited for.
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
        """Start the gather, unless the parameters are there or on their way, whatever still updates.

        `after_update`: the caller is the update of this unit, which has published what it wrote.
        """
        placement, gathering = self.shard.placement, gathering or self.gathering
        streams = placement.streams
        with self.buffer.lock:
            if self.state not in (State.SHARDED, State.REQUESTED, State.STALE):
                return
            with placement.events.span("gather", self.plan.name):
                if self.cut:
                    self.buffer.allocate()  # not on a side stream: memory is reused in the order of its own stream
                room = gathering.room()
                if after_update:
                    streams.gathers.wait(streams.up.record_event())
                with streams.gathers.after_current():
                    self._begin(gathering, room)
                self.buffer.move("gather")

    @untransformed
    def wait(self) -> None:
        """Block until the full parameters may be read; a no-op when they are."""
        while not self.readable:
            self.shard.settle()
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
                    if self.cut:
                        self.buffer.show()
                self.buffer.look_full()

    def complete(self) -> None:
        """All of the full buffer was filled, this rank's part too, without a gather."""
        self.shard.settle()
        with self.buffer.lock:
            self.shard.wait_filled()
            self.buffer.move("complete")
            if self.cut:
                self.buffer.show()
            self.buffer.look_full()

    @property
    def readable(self) -> bool:
        """Whether the full parameters are there for everybody to read."""
        return self.state is State.FULL and self.shard.pending is None

    def wait_sent(self) -> None:
        """Wait until the other ranks have what the last update sent them."""
        self.shard.settle()
        if self.state is State.GATHERING and self.stays_full:
            self.wait()

    def release(self, keep_if_referenced: bool = True) -> None:
        """Give the memory of the full parameters back, where parameters are cut; else they stay.

        With `keep_if_referenced`, memory that somebody has come to hold a view of since it was filled is left to him,
        and the unit takes new memory next time. Only a graph that was built meanwhile must not count as somebody: its
        views are to find the parameters again where they were, so whoever builds one passes False. What cannot
        be resized, as after `numpy()` and `share_memory_()`, is always left; a graph finds the values in it.
        """
        if not self.persistent:
            self._release(keep_if_referenced)

    def conceal(self) -> None:
        """Keep the memory, but let the parameters look released, so that it is noticed when somebody reads them."""
        if self.cut and self.state is State.FULL and not (self.persistent or self.holds):
            self._keep_writes()
            with self.buffer.lock:
                self.buffer.look_released()
                self.buffer.move("conceal")

    def invalidate(self) -> None:
        """The shard is about to change: whatever full copy there is must be gathered again. Nobody may hold it open.

        Tells autograd too, so that a graph built before the change raises, as it does in plain torch. What the
        user wrote into parameters until now is in the masters afterwards.
        """
        self.shard.settle()
        if self.cut:
            self.buffer.forget_graph()
            self._release(True)
            self.buffer.outdate()
            self.gathering.changed()
        else:
            self.take_writes()
            self.buffer.outdate()
            with self.buffer.lock:
                self.buffer.move("invalidate")

    def publish(self, after_update: bool = False) -> None:
        """The shard was updated: start to send it to those ranks that want it before its next use."""
        if self.stays_full:
            self.send(after_update)
        elif (
            not self.shard.placement.streamed
        ):  # else together with the gather, which waits for the stream of the update
            self.gathering.publish()

    def offload(self) -> None:
        """Nobody may read parameters or shard until `reload`; their storages may be given back between the two."""
        if self.holds:
            raise RuntimeError(f"unit '{self.plan.name}' is held open by GatheredParameters; leave that block first")
        self.shard.settle()
        self.buffer.forget_graph()
        self._release(True)
        self.take_writes()
        with self.buffer.lock:
            self.buffer.offload()

    def reload(self) -> None:
        """The storages hold what they held at `offload`."""
        with self.buffer.lock:
            self.buffer.reload()

    def absence(self) -> RuntimeError | None:
        """Why values cannot be worked on now, or None: they, or the state of the optimizer, are in host memory."""
        if self.state is State.AWAY or getattr(self.optimizer(), "away", False):
            return RuntimeError(f"the states of {self.buffer.name} are offloaded; call engine.reload_states() first")
        return None

    def ensure_gathered(self) -> bool:
        """Make the parameters readable because somebody is about to read them; False when nobody can now."""
        # For an update that runs, and what it sends; nobody else has to do anything for it.
        coming = self.persistent and (self.shard.pending is not None or self.state is State.GATHERING)
        if coming or (not self.cut and self.state is not State.AWAY):
            self.wait()
        return self.state is State.FULL or (self.on_read is not None and self.on_read(self))

    # -- what users and loads write

    def take_writes(self) -> None:
        """Where parameters are not cut: take what users have written into them in place as their exact values."""
        if not self.cut:
            if self.state is State.AWAY:
                if self.shard.master is not None:
                    raise self.absence()
                return
            self.wait()  # for an update that still runs
            self.shard.take_writes()

    def write_exact(self, start: int, values: torch.Tensor) -> None:
        """Replace the exact values from element `start` of the shard on by `values`, fp32 [k], and their roundings."""
        self.shard.write_exact(start, values)
        self.gathering.changed()

    def snapshot(self, index: int) -> torch.Tensor | None:
        """What this rank's shard says of parameter `index` now, for `overwrite` to tell later what has changed."""
        return self.shard.snapshot(index)

    def overwrite(self, index: int, source: int, before: torch.Tensor | None = None) -> None:
        """Replace parameter `index` by its value on rank `source` of `mesh.data`: full copy, shard and master.

        A collective. With `before`, elements that still have the values of that `snapshot` keep their exact masters.
        """
        comm.broadcast(self.buffer.views[index], source, self.mesh.data, self.plan.name)
        self.shard.take(index, before)
        self.gathering.changed()

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
        self.gathering.changed()

    # -- the gradient, and the end

    def reduce(self, leaf: Any = None) -> None:
        """Start to turn the full gradient into its reduced shard, once an update has done with the last one."""
        self.shard.settle()
        with self.shard.placement.events.span("reduce", self.plan.name):
            self.gradients.reduce(leaf)

    def dissolve(self, alone: bool = False) -> None:
        """Give every parameter storage of its own again, with its current value, and forget the flat buffers.

        `alone`: without the other ranks. Of cut parameters, what they hold is NaN then (0 where there is none).
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
        """Be readable with what is here; messages on their way are not waited for."""
        self._transfer = None
        with self.buffer.lock:
            if self.state in (State.SHARDED, State.REQUESTED):
                self.buffer.allocate()
                full = self.buffer.full
                full.copy_(absent(full.shape, full.dtype, full.device))
                try:
                    self.shard.fill()
                except (OSError, RuntimeError) as error:
                    logger.warning("the own part of %s could not be read either: %s", self.buffer.name, error)
        if self.state not in (State.FULL, State.CONCEALED):
            self.complete()
        self.wait()

    def _begin(self, gathering: Gathering, room: torch.Tensor) -> None:
        self._source, self._transfer = gathering, gathering.begin(room)

    def _wait_transfer(self) -> None:
        self.shard.wait_filled()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()

    @untransformed
    def _release(self, keep_if_referenced: bool) -> None:
        if not self.cut or self.holds or self.state in (State.SHARDED, State.AWAY):
            return
        with self.shard.placement.events.span("release", self.plan.name):
            self.wait()  # messages on their way still write into the buffer
            self._keep_writes()
            with self.buffer.lock:
                self.buffer.free(keep_if_referenced)

    def _keep_writes(self) -> None:
        """Before the full copy goes: take what a forward has written into it."""
        if self.shard.keep_writes(self._source.shown):
            self.gathering.written()


# Reading order, 3 of 7; next: zero/core/hooks.py, what follows a forward and a backward through the module.
