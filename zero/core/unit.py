"""A unit: parameters that are gathered, reduced and released together.

Four verbs move its parameters through the states of zero/core/state.py: `gather` starts to bring the full parameters,
`wait` makes them readable, `release` gives their memory back, `invalidate` says that the optimizer is about to change
them. `reduce` concerns the gradient and is legal in every state.

A unit is made of parts, each the only owner of its state: `buffer` (the full parameters), `masters` (the shard, the
exact values, the update that still runs), `gradients`, and `travel` (in which form parameters come from other ranks).
The unit has the order in which they act.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zero.core import comm
from zero.core.gradients import GradientDtypes, Gradients
from zero.core.initial_values import initial_values, share_beside, share_equal
from zero.core.master import Master
from zero.core.master_sync import MasterSync
from zero.core.mesh import Mesh
from zero.core.owner import Owner
from zero.core.param_buffer import ParamBuffer
from zero.core.released import absent
from zero.core.state import State
from zero.core.torch_private import untransformed
from zero.core.travel import Travel
from zero.log import logger
from zero.memory.state_placement import StatePlacement
from zero.plan.layout import Span
from zero.plan.units import UnitPlan

TAGS = 3  # of one unit: its gather, the scatter of its gradient, the gather of its sum


class Unit:
    """Parameters with one flat buffer, one shard, one gradient.

    mesh:       the ranks that share it, its own: units of one engine may have different ones;
    mean:       makes averages of the sums of its gradients over these ranks and the micro-batches of a step;
    placement:  where its shard, its state and its gradient rest;
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
        self.placement = placement
        cut = cut and (mesh.shard.size > 1 or placement.shard_offloaded)
        self.buffer = self.buffer_class(plan, params, cut, mesh.data.global_rank)
        window = plan.layout.shard(mesh.shard.rank, mesh.shard.size)
        self.masters = MasterSync(window, placement, self.buffer, mesh.data.size > 1)
        self.gradients: Gradients | None = None
        self.travel = Travel(mesh, self.masters, self.buffer, placement, TAGS * index)
        self.holds = 0
        self.edited: list[int] = []
        self.persistent = False
        self.on_read: Callable[[Unit], bool] | None = None
        self.optimizer: Callable[[], Any] = lambda: None  # until one is bound
        self.left_by: Any = None
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
    def full(self) -> torch.Tensor:
        """The flat buffer [layout.numel]."""
        return self.buffer.full

    @property
    def shard(self) -> torch.Tensor:
        """This rank's slice of the parameters [numel / shard axis]."""
        return self.masters.shard

    @property
    def master(self) -> Master | None:
        """The exact values of the shard, for the optimizer; None when the unit is frozen."""
        return self.masters.master

    @property
    def window(self) -> Span:
        """This rank's shard as a span of the flat buffer."""
        return self.masters.window

    @property
    def span(self) -> Span:
        """The part of its shard that this rank counts in norms and writes to checkpoints, as a span of the buffer."""
        return self.mesh.counted_span(self.plan.layout)

    def counted(self, values: torch.Tensor) -> torch.Tensor:
        """Those of the shard's values [n] that lie in the `span`; the other replicas count the others."""
        part = values.chunk(self.mesh.replica.size)[self.mesh.replica.rank]
        return part if self.mesh.counts else part[:0]

    def adopt(
        self, dtype: torch.dtype, device: torch.device, gradient_dtypes: GradientDtypes, remainder: bool = False
    ) -> None:
        """Move the parameters into flat storage, with rank 0's values, and keep this rank's shard.

        The masters are made from the values before they are rounded to a 16-bit `dtype`; see `initial_values`.
        """
        trained = self.plan.requires_grad
        share_beside(self.params, self.mesh.data, self.plan.name)
        share_equal(self.params, self.plan, self.mesh.beside)
        full, master = initial_values(self.params, self.plan, self.mesh, self.window, dtype, device, remainder)
        self.buffer.adopt(full)
        self.masters.adopt(trained, master)
        self.travel.keep_second()
        for position, param in enumerate(self.params):
            param._zero_owner = Owner(self.plan.params[position].name, self, position)
        if trained:
            shapes = [param.shape for param in self.params]
            tag = TAGS * self.index + 1
            self.gradients = Gradients(self.plan, shapes, self.mesh, gradient_dtypes, device, tag, self.placement)

    # -- the parameters

    def gather(self, deferred: bool = False) -> None:
        """Start to bring the full parameters; a no-op when they are there or on their way.

        With `deferred`, an update that runs is not waited for. On this rank the gather then begins with the next call
        after the update, or in `wait`, which every way out of it goes through: others may have begun it, and get
        their part.
        """
        if deferred and self.masters.updating:
            with self.buffer.lock:
                if self.state is State.SHARDED and not self.persistent:  # others are sent by the update
                    self.buffer.move("request")
            return
        self.masters.settle_for(self.placement.streams.gathers)  # who reads them waits for both, in `wait`
        if self.state is State.AWAY:
            raise self.absence()
        self.send()

    def gather_exact(self) -> None:
        """As `gather`, of the values themselves where all compute with what 8 bits say, until the release; collective.

        What was decoded is replaced, which is waited for.
        """
        self.travel.exact = True
        try:
            self.gather()
            if self.travel.decoded:
                self.wait()
                self._keep_writes()
                with self.placement.streams.gathers.after_current():
                    self._transfer = self.travel.begin(self.travel.room())
                self._wait_transfer()
        finally:
            self.travel.exact = False

    @untransformed
    def send(self, after_update: bool = False) -> None:
        """Start the gather, unless the parameters are there or on their way, whatever still updates.

        `after_update`: the caller is the update of this unit, which has published what it wrote.
        """
        streams = self.placement.streams
        with self.buffer.lock:
            if self.state not in (State.SHARDED, State.REQUESTED, State.STALE):
                return
            with self.placement.events.span("gather", self.plan.name):
                if self.cut:
                    self.buffer.allocate()  # not on a side stream: memory is reused in the order of its own stream
                room = self.travel.room()
                if after_update:
                    streams.gathers.wait(streams.up.record_event())
                with streams.gathers.after_current():
                    self._transfer = self.travel.begin(room)
                self.buffer.move("gather")

    @untransformed
    def wait(self) -> None:
        """Block until the full parameters may be read; a no-op when they are."""
        while not self.readable:
            self.settle()
            with self.buffer.lock:
                if self.masters.pending is not None:
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
        """Somebody has filled all of the full buffer, the own shard too: as `gather` and `wait`, without a message."""
        self.settle()
        with self.buffer.lock:
            self.buffer.move("gather")
            self.buffer.move("wait")
            self.buffer.look_full()

    @property
    def readable(self) -> bool:
        """Whether the full parameters are there for everybody to read."""
        return self.state is State.FULL and self.masters.pending is None

    def wait_sent(self) -> None:
        """Wait until the other ranks have what the last update sent them."""
        self.settle()
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
        self.settle()
        if self.cut:
            self.buffer.forget_graph()
            self._release(True)
            self.buffer.outdate()
            self.travel.changed()
        else:
            self.take_writes()
            self.buffer.outdate()
            with self.buffer.lock:
                self.buffer.move("invalidate")

    def publish(self, after_update: bool = False) -> None:
        """The shard was updated: start to send it to those ranks that want it before its next use."""
        if self.stays_full:
            self.send(after_update)
        elif not self.placement.streamed:  # else together with the gather, which waits for the stream of the update
            self.travel.send_secondary()

    def offload(self) -> None:
        """Nobody may read parameters or shard until `reload`; their storages may be given back between the two."""
        if self.holds:
            raise RuntimeError(f"unit '{self.plan.name}' is held open by GatheredParameters; leave that block first")
        self.settle()
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
        coming = self.persistent and (self.masters.pending is not None or self.state is State.GATHERING)
        if coming or (not self.cut and self.state is not State.AWAY):
            self.wait()
        return self.state is State.FULL or (self.on_read is not None and self.on_read(self))

    # -- shard and masters

    def fetch(self) -> bool:
        """Begin to read a shard that rests in a file; False where memory for it, or an update, must be waited for."""
        if self.masters.updating:
            return False
        self.settle()
        return self.placement.shard_store.fetch()

    def settle(self) -> None:
        """Wait until no update of the shard runs any more; raises what it raised, and again each time."""
        if self.masters.pending is not None:
            self.masters.settle()

    def acquired(self, changed: bool = False, step: bool = False, in_update: bool = False) -> Any:
        """See `MasterSync.acquired`."""
        return self.masters.acquired(changed, step, in_update)

    def take_writes(self) -> None:
        """Where parameters are not cut: take what users have written into them in place as their exact values."""
        if not self.cut:
            if self.state is State.AWAY:
                if self.master is not None:
                    raise self.absence()
                return
            self.wait()  # for an update that still runs
            self.masters.take_writes()

    def exact(self) -> torch.Tensor:
        """The masters of this rank's shard as fp32 [n], writes of users included; to be read only."""
        self.take_writes()
        return self.masters.exact()

    def write_exact(self, start: int, values: torch.Tensor) -> None:
        """Replace the exact values from element `start` of the shard on by `values`, fp32 [k], and their roundings."""
        self.masters.write_exact(start, values)
        self.travel.changed()

    def snapshot(self, index: int) -> torch.Tensor | None:
        """What this rank's shard says of parameter `index` now, for `overwrite` to tell later what has changed."""
        return self.masters.snapshot(index)

    def overwrite(self, index: int, source: int, before: torch.Tensor | None = None) -> None:
        """Replace parameter `index` by its value on rank `source` of `mesh.data`: full copy, shard and master.

        A collective. With `before`, elements that still have the values of that `snapshot` keep their exact masters.
        """
        comm.broadcast(self.buffer.views[index], source, self.mesh.data, self.plan.name)
        self.masters.take(index, before)
        self.travel.changed()

    def renew(self, index: int, values: torch.Tensor) -> None:
        """Take `values` [numel], in the unit's dtype, as parameter `index` in the full copy, where there is one.

        Shard and master hold them already. Autograd is told, so that a graph built before raises, as in plain torch.
        """
        self.settle()
        if self.state in (State.REQUESTED, State.GATHERING):
            self.wait()
        if self.state in (State.FULL, State.CONCEALED):
            self.buffer.views[index].view(-1).copy_(values)
        else:
            self.buffer.forget_graph()
        if not (self.holds and self.state is State.FULL):  # GatheredParameters would take it for a change that is lost
            self.buffer.outdate([index])
        self.travel.changed()

    # -- the gradient, and the end

    def reduce(self, leaf: Any = None) -> None:
        """Start to turn the full gradient into its reduced shard, once an update has done with the last one."""
        self.settle()
        with self.placement.events.span("reduce", self.plan.name):
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
        self.masters.wait_copies()
        self.placement.close()

    def _stand_alone(self) -> None:
        """Be readable with what is here; messages on their way are not waited for."""
        self._transfer = None
        with self.buffer.lock:
            if self.state in (State.SHARDED, State.REQUESTED):
                self.buffer.allocate()
                self.full.copy_(absent(self.full.shape, self.full.dtype, self.full.device))
                try:
                    self.masters.fill()
                except (OSError, RuntimeError) as error:
                    logger.warning("the own part of %s could not be read either: %s", self.buffer.name, error)
            if self.state in (State.SHARDED, State.REQUESTED, State.STALE):
                self.buffer.move("gather")
        self.wait()

    def _wait_transfer(self) -> None:
        self.masters.wait_filled()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()

    @untransformed
    def _release(self, keep_if_referenced: bool) -> None:
        if not self.cut or self.holds or self.state in (State.SHARDED, State.AWAY):
            return
        with self.placement.events.span("release", self.plan.name):
            self.wait()  # messages on their way still write into the buffer
            self._keep_writes()
            with self.buffer.lock:
                self.buffer.free(keep_if_referenced)

    def _keep_writes(self) -> None:
        self.travel.keep_writes()


# Reading order, 3 of 7; next: zero/core/hooks.py, what follows a forward and a backward through the module.
