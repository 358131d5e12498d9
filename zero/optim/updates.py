"""Updates the units of a step: on the device at once, or beside the training loop if state rests off the device.

The host's update of a unit reads its state ahead, computes, copies the new parameters to the device and writes the
state back, while the loop runs the next forward, which waits for each unit when it reaches it. Streamed state
is copied to the device instead, by a separate stream, and updated there; the first units' state comes during the
preceding backward. The numbers are those of a step without overlap.
"""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit
from zero.core.waits import follow_compiler
from zero.core.weak import before_exit
from zero.kernels.marks import mark
from zero.log import logger
from zero.memory.available import host_threads
from zero.memory.pending_update import PendingUpdate, Waits
from zero.memory.streams import Event, entered, record_event
from zero.optim.shard_optimizer import Group, ShardOptimizer, Update
from zero.plan.memory import SLOTS
from zero.plan.order import in_use_order

Around = Callable[[Unit, torch.Tensor], contextlib.AbstractContextManager[None]]


class UnitUpdater:
    """Runs the updates of all units. Those beside the loop run in order; after a failed one the rest is refused.

    One thread runs them, except those that need no wait for host or drive: the loop queues these.

    failure:   RuntimeError with the unit of the first failed update, and the cause; or None;
    threads:   how many compute one update of the host; 0 if it updates nothing;
    threaded:  whether a thread runs any;
    waits:     the training loop's time waiting for updates;
    around:    called with the unit and its gradient, returns a context around the update; None for nothing;
    on_update: called with ("update" or "done", unit name) for updates beside the loop; for tests and
               measurements.
    """

    def __init__(self, optimizer: ShardOptimizer, sharded: ShardedModule, groups: Sequence[Group]) -> None:
        units, self._world, self._device = sharded.trained, sharded.world, sharded.device
        self.failure: RuntimeError | None = None
        self.threads = host_threads() if any(unit.shard.placement.updated_on_host for unit in units) else 0
        self.waits = Waits()
        self.around: Around | None = None
        self.on_update: Callable[[str, str], None] = lambda what, unit: None
        self._optimizer = optimizer
        # In the order of the next forward: the root's units, which it reads first, may be registered last.
        self._units = [units[index] for index in in_use_order([unit.plan.anchor for unit in units])]
        self._worker = ThreadPoolExecutor(1, "zero-updates")  # starts at the first update; ends with this object
        self._first = [unit for unit in self._units if unit.shard.placement.streamed][:SLOTS]
        self._next: list[Unit] = []  # units whose state is needed soon, in order
        self._submitted: list[Unit] = []  # in the last step
        self.threaded = any(unit.shard.placement.state_offloaded and not unit.shard.placement.queued for unit in units)
        # They send behind a step, perhaps when the program has destroyed the groups, which are to live for that.
        axes = [axis for unit in units for axis in (unit.mesh.shard, unit.mesh.across)] if self.threaded else []
        self._groups = [axis.group for axis in axes if axis is not None]
        if self.threaded or any(unit.late.awaited or unit.persistent for unit in units):
            send_before_exit(units, self._groups)
            _ALL.add(self)
        if any(unit.shard.placement.state_offloaded for unit in units):
            for unit in units:
                optimizer.states.begin(unit, groups[unit.plan.group])

    def run(self, groups: Sequence[Group], factor: float | torch.Tensor) -> None:
        """Update every unit once with `factor` x the reduced gradient, and send it to the ranks that keep it."""
        # If ranks must begin collectives in one order, no thread beside the loop can send parameters.
        publish = not any(unit.mesh.shard.ordered for unit in self._units)
        updates, now = [], []
        for unit in self._units:
            if unit.shard.placement.state_offloaded:
                unit.invalidate()
                group = copy_hyperparameters(groups[unit.plan.group])
                sends = publish or unit.shard.placement.queued
                updates.append(Update(unit, unit.gradients.sum.hand_over(), group, factor, sends))
            else:
                now.append(Update(unit, unit.gradients.shard, groups[unit.plan.group], factor))
        self._optimizer.prepare(sorted([*updates, *now], key=lambda update: update.unit.index), self._world)
        self._submit(updates)
        sent = {update.unit.index for update in updates if update.publish}
        for update in now:
            update.unit.invalidate()  # before the values change: a full copy that is being read must be complete
            self._compute(update)
            update.unit.publish()  # sent while the next unit is updated
        follow_compiler()
        # Behind all updates and in one order on all ranks, as their backends want; whoever reads a unit waits for it.
        for unit in self._units:
            if unit.stays_full and unit.index not in sent:
                unit.gather()
                unit.step_ends()

    def bring_ahead(self) -> None:
        """Copy the state of the units that the next step updates first to the device; nothing is updated."""
        for unit in self._first:
            if unit.shard.placement.queued:
                self._bring(unit)
            else:
                self._worker.submit(self._bring, unit)  # a failure repeats at the step, which reports it

    def receive(self) -> None:
        """Wait for what the last step has left in flight, but not for updates."""
        for unit in self._units:
            if unit.shard.pending is None:
                unit.wait_sent()

    def close(self) -> None:
        """Wait until all updates have run, whether they failed or not."""
        self._worker.shutdown(wait=True)
        self._groups.clear()

    def _submit(self, updates: Sequence[Update]) -> None:
        """Run these updates beside the loop; each unit waits for its own."""
        ready = record_event(self._device)  # after all reads of the old parameters
        self._submitted = [update.unit for update in updates]
        self._next += self._submitted
        pending = [PendingUpdate(self.waits) for _ in updates]
        for update, result in zip(updates, pending, strict=True):
            if update.unit.shard.placement.queued:
                result.run(self._run, update, ready)
            else:
                self._worker.submit(result.run, self._run, update, ready)
        for update, result in zip(updates, pending, strict=True):
            update.unit.shard.defer(result)

    def _bring(self, unit: Unit) -> None:
        with unit.shard.placement.streams.up.entered():
            unit.shard.placement.state_store.bring()

    @torch.no_grad()
    def _run(self, update: Update, ready: Event | None) -> Event | None:
        """One update beside the loop; returns an event after which the device has the result."""
        unit, rank = update.unit, update.unit.mesh.data.global_rank
        if self.failure is not None:
            # Not chained: each unit would keep the memory alive to which the frames of the first failure refer.
            raise RuntimeError(f"unit '{unit.plan.name}' was not updated (rank {rank}), because {self.failure}")
        try:
            self._read_ahead()
            up = unit.shard.placement.streams.up
            up.wait(ready)
            for used in (update.grad, update.factor) if unit.shard.placement.streamed else ():
                if isinstance(used, torch.Tensor):
                    up.record_stream(used)
            # Full parameters, which `publish` takes memory for, are the loop's.
            with entered(ready and ready.stream):
                with up.entered() if unit.shard.placement.streamed else contextlib.nullcontext():
                    self._compute(update)
                if update.publish:
                    unit.publish(after_update=True)
            self.on_update("done", unit.plan.name)
            return up.record_event()
        except BaseException as error:
            text = f"the update of unit '{unit.plan.name}' failed on rank {rank} with {type(error).__name__}: {error}"
            self.failure = RuntimeError(text)
            logger.error("%s", text)  # the loop may have taken its last step, and never raise it
            # This rank may be anywhere, and others wait for parameters that it will never send.
            unit.mesh.data.watchdog.fail(self.failure)
            raise self.failure from error

    def _compute(self, update: Update) -> None:
        """Compute one update where the unit's state is used, and copy the new parameters to the device."""
        unit, placement = update.unit, update.unit.shard.placement
        on_host = placement.updated_on_host
        with unit.shard.acquired(changed=True, step=True, in_update=True):
            if placement.state_offloaded:
                self._next.remove(unit)
                self._read_ahead()  # by now other states may have been written
                self.on_update("update", unit.plan.name)
            grad = update.grad.to(placement.update_device)
            changes, before = unit.shard.changes, None
            if changes is not None and not self._optimizer.marks_changes:
                before = unit.shard.master.shard.clone()
            around = contextlib.nullcontext() if self.around is None else self.around(unit, grad)
            with around, placement.events.span("update", unit.plan.name):
                self._optimizer.update(unit, grad, update.group, update.factor, self.threads if on_host else None)
            if before is not None:
                mark(changes.marks(), before, unit.shard.master.shard)
            with placement.streams.up.entered() if on_host else contextlib.nullcontext():
                unit.shard.publish()
                unit.gathering.encode()

    def _read_ahead(self) -> None:
        """Start to read the state of as many units as memory allows, in order; after the last one the first."""
        for unit in (*self._next, *self._submitted):
            if not unit.shard.placement.state_store.fetch():
                break


_ALL: weakref.WeakSet[UnitUpdater] = weakref.WeakSet()


def _receive_before_fork() -> None:
    """A forked process lacks the threads of the backend, and would wait for ever for what is in flight."""
    for updater in list(_ALL):
        updater.receive()


os.register_at_fork(before=_receive_before_fork)


def copy_hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the current hyperparameters of a group; schedulers write into tensors and lists, too."""
    values = {key: value for key, value in group.items() if key != "params"}
    tensors = {key: value.detach().clone() for key, value in values.items() if isinstance(value, torch.Tensor)}
    return copy.deepcopy({key: value for key, value in values.items() if key not in tensors}) | tensors


def send_before_exit(units: Sequence[Unit], groups: list[Any]) -> None:
    """Before this process exits normally, deliver its last parameters to the ranks that may still read them.

    The messages of an exited process are lost. A process that dies of an exception does not wait for others. The
    process groups may go then: `groups` is emptied.
    """
    refs = [weakref.ref(unit) for unit in units]

    def send() -> None:
        for unit in filter(None, (ref() for ref in refs)):
            try:
                unit.wait_sent()
            except RuntimeError:
                break  # other ranks are gone, or the update has failed: no rank waits for us
        groups.clear()

    before_exit(units[0], send)
