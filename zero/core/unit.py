"""A unit: parameters that are gathered, reduced and released together, as a small state machine.

    SHARDED --gather--> GATHERING --wait--> FULL --release / invalidate--> SHARDED

The fifth verb, reduce, concerns the gradient and is legal in every state.

Storage is flat, parameters are not: the module keeps its own `nn.Parameter` objects, which become views of
the unit's flat buffer. Releasing resizes that buffer's storage to 0 and gathering resizes it back, so that
views which autograd saved in between are valid again when backward reaches them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zero.core import comm
from zero.core.comm import Transfer
from zero.core.gradients import GradientDtypes, Gradients
from zero.core.master import Master, rounded
from zero.core.master_sync import MasterSync
from zero.core.mesh import Mesh
from zero.core.owner import Owner, copy_to, owner_of
from zero.core.released import absent, released_class
from zero.core.state import LEGAL, State
from zero.core.tensors import holders_of, memory_of, resizable, untransformed
from zero.core.updated import Updated
from zero.log import logger
from zero.memory.copy_stream import wait_event
from zero.memory.pending_update import PendingUpdate
from zero.memory.state_placement import StatePlacement
from zero.plan.layout import Span
from zero.plan.units import UnitPlan


class Unit(MasterSync, Updated):
    """Parameters with one flat buffer, one shard, one gradient.

    full:   flat [layout.numel] in the unit's dtype; its storage has size 0 while released;
    shard:  this rank's slice [numel / shard axis]: a view of `full` unless parameters are cut;
    master: the exact values of that slice, for the optimizer; None when frozen;
    holds:  how many readers (`GatheredParameters`) keep it full for now;
    edited: indices of the parameters that such readers will write back, one entry for each reader;
    bring:  asked when somebody reads a parameter that is away; makes the unit full and says True, or False;
    placement: where its shard, its state and its gradient rest;
    pending: the update of the last step, while it may still run beside us, or None;
    graph:  a graph that was built by a reader may find the parameters where they are, also while they look released;
    whole:  stays full between uses although it is cut: only the optimizer's step takes its full copy away;
    optimizer: gives the optimizer that updates it, or None; weak, because parameters outlive engines;
    mesh:   the ranks that share it;
    left:   the `ShardedModule` that it belongs to, once the engine is gone without having given the parameters back.
    """

    _away = staticmethod(released_class)

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
        self.params = list(params)
        self.placement = placement
        self.cut = cut and (mesh.shard.size > 1 or placement.shard_offloaded)
        self.pending: PendingUpdate | None = None
        self.state = State.FULL
        self.gradients: Gradients | None = None
        self.holds = 0
        self.edited: list[int] = []
        self.bring: Callable[[Unit], bool] | None = None
        self.optimizer: Callable[[], Any] = lambda: None  # until one is bound
        self.left: Any = None
        self.whole = self.graph = False
        self._covered = False  # full, but the parameters look released
        self._late = False  # gathering, but nothing is on its way yet
        self._holders = 0  # of the full buffer's memory, before it was filled
        self.mesh = mesh
        self._waiting = threading.RLock()  # several threads may come to read at once
        self._changing = threading.Lock()  # of `pending`, and with it of what is covered
        self._axis = mesh.shard
        self._transfer: Transfer | None = None
        self._filled: torch.cuda.Event | None = None  # after it the own part of the full buffer is there
        self._copied: torch.cuda.Event | None = None  # after it what was pushed is in host memory
        self._kinds = [type(param) for param in params]
        self._versions = [param._version for param in params]
        self._thawed = [param.requires_grad for param in params]

    @property
    def window(self) -> Span:
        """This rank's shard as a span of the flat buffer."""
        return self.plan.layout.shard(self._axis.rank, self._axis.size)

    def adopt(
        self, dtype: torch.dtype, device: torch.device, gradient_dtypes: GradientDtypes, remainder: bool = False
    ) -> None:
        """Move the parameters into flat storage, with rank 0's values, and keep this rank's shard.

        The masters are cut from the values before they are rounded to a 16-bit `dtype`; with `remainder`, which
        needs bf16, what is kept of them is what the rounding took away. A parameter built under `zero.Init` is fetched
        from its ranks, one at a time, and is not sent again.
        """
        layout, trained = self.plan.layout, self.plan.requires_grad
        source = torch.float32 if trained and dtype.itemsize < 4 else dtype
        flat = torch.zeros(layout.numel, dtype=source, device=device)
        places = [flat.narrow(0, *span) for span in layout.spans.values()]
        unequal = [place for param, place in zip(self.params, places, strict=True) if not copy_to(param, place)]
        for place in [flat] if len(unequal) == len(places) else unequal:
            for axis in (self.mesh.shard, self.mesh.replica):
                comm.broadcast(place, 0, axis, self.plan.name)
        self._kinds = [type(param) for param in self.params]  # of released ones, only now
        own = self.window
        self.full = flat if source == dtype else rounded(flat, dtype)
        self.shard = self.placement.keep_shard(self.full.narrow(0, *own)) if self.cut else self.full.narrow(0, *own)
        self.master = self._make_master(flat.narrow(0, *own), remainder) if trained else None
        self._views = self._views_of(self.full)
        self._holders = holders_of(self.full)
        self._absent = [absent(param.shape, dtype, device) for param in self.params]
        for position, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            param.data = view
            param.grad = None
            param._zero_owner = Owner(self.plan.params[position].name, self, position)
        self._versions = [param._version for param in self.params]
        if trained:
            shapes = [param.shape for param in self.params]
            self.gradients = Gradients(self.plan, shapes, self.mesh, gradient_dtypes, device, 3 * self.index + 1)
            self.gradients.rest = self.placement.host_gradients

    def gather(self, patient: bool = False) -> None:
        """Start to bring the full parameters; a no-op when they are there or on their way.

        `patient`: an update that runs is not waited for. On this rank the gather then begins with the next call after
        the update, or in `wait`, which every way out of it goes through: others may have begun it, and get their part.
        """
        if patient and self.updating:
            if self.state is State.SHARDED and self.cut and not self.whole:  # others are sent by the update
                self._move("gather")
                self._late = True
            return
        self.settle()
        if self.state is State.AWAY:
            raise self.absence()
        if self.state is State.SHARDED:
            self.send()
        self._catch_up()

    def read(self) -> bool:
        """Begin to read a shard that rests in a file; False where memory for it, or an update, must be waited for."""
        if self.updating:
            return False
        self.settle()
        return self.placement.shard_store.fetch()

    def unread(self) -> None:
        """Give up what `read` has begun."""
        self.placement.shard_store.cancel_fetch()

    @untransformed
    def send(self, pushed: bool = False) -> None:
        """Start the gather whatever still updates: for `gather`, and for an update that has ended and `pushed`."""
        copies, tag = self.placement.copies, 3 * self.index
        if self.cut:
            self._allocate()  # not on the lane: memory is reused in the order of the stream that took it
            with copies.after_current():
                self._fill()
                self._transfer = comm.gather(self.full, self._axis, tag)
        else:
            with copies.entered() if pushed else contextlib.nullcontext():
                self._transfer = comm.gather(self.full, self._axis, tag)
        self._move("gather")

    def _catch_up(self) -> None:
        """Begin what a patient gather has put off; no update runs."""
        if self._late:
            self._late, self.state = False, State.SHARDED
            self.send()

    def complete(self) -> None:
        """Somebody has filled all of the full buffer, the own shard too: as `gather` and `wait`, without a message."""
        self.settle()
        self._move("gather")
        self._move("wait")
        self._uncover()

    @untransformed
    def wait(self) -> None:
        """Block until the full parameters may be read; a no-op when they are."""
        if self.readable:
            return
        with self._waiting:
            self.settle()
            if self.state is not State.FULL:
                self._catch_up()
                wait_event(self._filled, self.full.device)
                transfer, self._transfer = self._transfer, None
                if transfer is not None:
                    transfer.wait()
                self._move("wait")
                if self.cut:
                    self._show()
            with self._changing:
                if self.pending is None:
                    self._uncover()

    @property
    def readable(self) -> bool:
        """Whether the full parameters are there for everybody to read."""
        return self.state is State.FULL and self.pending is None and not self._covered

    def wait_sent(self) -> None:
        """Wait until the other ranks have what the last update sent them."""
        self.settle()
        if self.state is State.GATHERING and (self.whole or not self.cut):
            self.wait()

    def release(self, spare: bool = True) -> None:
        """Give the memory of the full parameters back, where parameters are cut; else they stay.

        With `spare`, memory that somebody has come to hold a view of since it was filled is left to him, and the
        unit takes new memory next time. Only a graph that was built meanwhile must not count as somebody: its
        views are to find the parameters again where they were, so whoever builds one says `spare=False`. What cannot
        be resized, as after `numpy()` and `share_memory_()`, is always left; a graph finds the values in it.
        """
        if not self.whole:
            self._release(spare)

    def cover(self) -> None:
        """Keep the memory, but let the parameters look released, so that it is noticed when somebody reads them."""
        if self.cut and self.state is State.FULL and not (self.whole or self.holds or self._covered):
            self.keep_writes()
            self._veil()

    def invalidate(self) -> None:
        """The shard is about to change: whatever full copy there is must be gathered again. Nobody may hold it open.

        Tells autograd too, so that a graph built before the change raises, as it does in plain torch. What the
        user wrote into parameters until now is in the masters afterwards.
        """
        self.settle()
        if self.cut:
            self.forget_graph()
            self._release(True)
            self._versions = [version + 1 for version in self._versions]
            return
        self.wait()
        self.take_edits()
        torch.autograd.graph.increment_version(self.params)
        self._versions = [param._version for param in self.params]
        self._move("invalidate")

    def put_away(self) -> None:
        """Nobody may read parameters or shard until `take_back`; their storages may be given back between the two."""
        if self.holds:
            raise RuntimeError(f"unit '{self.plan.name}' is held open by GatheredParameters; leave that block first")
        self.settle()
        self.forget_graph()
        self._release(True)
        if not self.cut:
            self.wait()
            self.take_edits()
            self._hide()
        self._move("put away")

    def take_back(self) -> None:
        """The storages hold what they held at `put_away`."""
        if self.cut:
            self._move("take back")
        else:
            self._show()
            self._move("show")

    def absence(self) -> RuntimeError | None:
        """Why values cannot be worked on now, or None: they, or the state of the optimizer, are in host memory."""
        if self.state is State.AWAY or getattr(self.optimizer(), "away", False):
            return RuntimeError(
                f"the states of unit '{self.plan.name}' are offloaded (rank {self._axis.rank}); "
                "call engine.reload_states() first"
            )
        return None

    def summon(self) -> bool:
        """Make the parameters readable because somebody is about to read them; False when nobody can now."""
        # For an update that runs, and what it sends; nobody else has to do anything for it.
        coming = self.whole and (self.pending is not None or self.state is State.GATHERING)
        if coming or (not self.cut and self.state is not State.AWAY):
            self.wait()
        shown = self.state is State.FULL and not self._covered
        return shown or (self.bring is not None and self.bring(self))

    def references(self) -> tuple[int, ...]:
        """Numbers of which one grows when a graph comes to hold a parameter, or anybody a view of one."""
        return holders_of(self.full), *(param._use_count() for param in self.params)

    def forget_graph(self) -> None:
        """No graph reads the values any more that a reader has left; one that does all the same raises."""
        if self.graph and self.state in (State.SHARDED, State.GATHERING):
            with torch._C.DisableTorchFunctionSubclass():
                self._blank()
        self.graph = False

    @property
    def memory(self) -> int | None:
        """What tells the memory of the full parameters from all other: equal for every view of it."""
        return memory_of(self.full)

    @staticmethod
    def summon_all(params: Sequence[nn.Parameter]) -> bool:
        """Summon the units of all these parameters so that bringing one does not send another away again."""
        units = list({id(owner.unit): owner.unit for owner in map(owner_of, params)}.values())
        held = [unit for unit in units if unit.cut]  # others stay, and other threads may read them at the same time
        for unit in held:
            unit.holds += 1
        try:
            return all(unit.summon() for unit in units)
        finally:
            for unit in held:
                unit.holds -= 1

    def reduce(self) -> None:
        """Start to turn the full gradient into its reduced shard, once an update has done with the last one."""
        self.settle()
        self.gradients.reduce()

    def dissolve(self, alone: bool = False) -> None:
        """Give every parameter storage of its own again, with its current value, and forget the flat buffers.

        `alone`: without the other ranks. Of cut parameters, what they hold is NaN then (0 where there is none).
        """
        if alone:
            self._stand_alone()
        else:
            self.gather()
            self.wait()
        for param in self.params:
            param.data = param.data.clone()
            vars(param).pop("_zero_owner", None)  # not there after torch.utils.swap_tensors
        if self.gradients is not None:
            self.gradients.drop()
        self.land()
        self.placement.close()

    def _stand_alone(self) -> None:
        """Be readable with what is here; messages on their way are not waited for."""
        self._transfer = None
        if self._late:
            self._late, self.state = False, State.SHARDED
        if self.cut and self.state is State.SHARDED:
            self._allocate()
            self.full.copy_(absent(self.full.shape, self.full.dtype, self.full.device))
            try:
                self._fill()
            except (OSError, RuntimeError) as error:
                logger.warning("the own part of unit '%s' could not be read either: %s", self.plan.name, error)
            self._move("gather")
        if self.state is State.SHARDED:
            self._uncover()
        else:
            self.wait()

    def _make_master(self, exact: torch.Tensor, remainder: bool) -> Master:
        """The master of `exact`, fp32 [n], where the step is computed; with a copy of the shard if need be."""
        placement = self.placement
        # The shard itself may be in a file by now.
        shard = placement.shard_for_master(self.full.narrow(0, *self.window), self.shard)
        master = Master(shard, exact.to(placement.update_device), remainder)
        placement.keep_state(shard, master.tensors())
        return master

    def _fill(self) -> None:
        """Copy the shard to its place in the full buffer, from wherever it rests, on the lane."""
        self._filled = self.placement.read_shard(self.shard, self.full.narrow(0, *self.window))

    @untransformed
    def _release(self, spare: bool) -> None:
        if not self.cut or self.holds or self.state in (State.SHARDED, State.AWAY):
            return
        self.wait()  # messages on their way still write into the buffer
        self.keep_writes()
        try:
            self._hide()
            self._free(spare)
        except BaseException:
            self._show()  # the memory is there as it was
            raise
        self._move("release")

    def _allocate(self) -> None:
        self._holders = holders_of(self.full)
        self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)

    def _free(self, spare: bool) -> None:
        full, views = self.full, self._views
        held = self.graph or (spare and holders_of(full) > self._holders)
        if held or not resizable(full.untyped_storage()):
            with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
                full = torch.empty_like(full)
                views = self._views_of(full)
        full.untyped_storage().resize_(0)
        self.full, self._views = full, views

    def _move(self, verb: str) -> None:
        after = LEGAL.get((self.state, verb))
        if after is None:
            raise RuntimeError(
                f"unit '{self.plan.name}' (rank {self._axis.rank}) cannot {verb} while it is {self.state.value}"
            )
        self.state = after

    def _views_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        spans = self.plan.layout.spans.values()
        return [full.narrow(0, *span).view(param.shape) for param, span in zip(self.params, spans, strict=True)]

    def _veil(self) -> None:
        self._covered = True
        for param, kind in zip(self.params, self._kinds, strict=True):
            param.__class__ = self._away(kind)

    def _uncover(self) -> None:
        if self._covered:
            for param, kind in zip(self.params, self._kinds, strict=True):
                param.__class__ = kind
            self._covered = False

    def _show(self) -> None:
        for param, view, kind in zip(self.params, self._views, self._kinds, strict=True):
            param.__class__ = kind
            param.data = view
        torch._C._autograd._unsafe_set_version_counter(tuple(self.params), tuple(self._versions))

    def _hide(self) -> None:
        self._versions = [param._version for param in self.params]
        if not self.graph:
            self._blank()
        for param, kind in zip(self.params, self._kinds, strict=True):
            param.__class__ = self._away(kind)

    def _blank(self) -> None:
        torch.autograd.graph.increment_version(self.params)
        for param, nothing in zip(self.params, self._absent, strict=True):
            param.data = nothing
