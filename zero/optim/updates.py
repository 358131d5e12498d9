"""Optimizer steps that run beside the training loop: one unit after the other, in the order of their next use.

The host's update of one unit reads its state ahead, computes, shows the new parameters to the device and writes the
state back, while the loop goes on with the next forward; that waits for each unit when it comes to it. The numbers are
those of a step that nobody overlaps.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from zero.core.unit import Unit
from zero.log import logger
from zero.memory.pending_update import PendingUpdate, Waits
from zero.optim.fused import ShardOptimizer


class Update(NamedTuple):
    """One unit's part of a step. It keeps the gradient alive, and what the hyperparameters were at the step."""

    unit: Unit
    grad: torch.Tensor
    group: Mapping[str, Any]
    factor: float
    publish: bool  # to send the new parameters to the other ranks


class Updates:
    """A thread that takes updates in order; after one that failed it refuses the rest.

    failure: RuntimeError that names the unit of the first failed update and says what that raised, or None;
    threads: how many compute one update;
    waits:   what the training loop has waited for updates;
    on_update: called with (what, unit name) as updates go through "update" and "done"; for tests and measurements.
    """

    def __init__(self, rule: ShardOptimizer, threads: int) -> None:
        self.failure: RuntimeError | None = None
        self.threads = threads
        self.waits = Waits()
        self.on_update: Callable[[str, str], None] = _ignore
        self._rule = rule
        # One thread: it ends when nobody holds us any more.
        self._worker = ThreadPoolExecutor(1, "zero-updates")
        self._ahead: list[Unit] = []  # units whose state is wanted soon, in order
        self._all: list[Unit] = []  # of the last step

    def submit(self, updates: Sequence[Update]) -> list[PendingUpdate]:
        """Have these run; each promise is of the event after which the device has the result."""
        self._all = [update.unit for update in updates]
        self._ahead += self._all
        process = os.getpid()
        return [PendingUpdate(self._worker.submit(self._run, update), process, self.waits) for update in updates]

    def close(self) -> None:
        """Wait until all have run, whether they failed or not."""
        self._worker.shutdown(wait=True)

    @torch.no_grad()
    def _run(self, update: Update) -> Any:
        unit, rank = update.unit, update.unit.mesh.global_rank
        if self.failure is not None:
            # Not chained: each unit would keep the memory alive that the frames of the first failure refer to.
            raise RuntimeError(f"unit '{unit.plan.name}' was not updated (rank {rank}), because {self.failure}")
        try:
            return self._update(update)
        except BaseException as error:
            text = f"the update of unit '{unit.plan.name}' failed on rank {rank} with {type(error).__name__}: {error}"
            self.failure = RuntimeError(text)
            logger.error("%s", text)  # the loop may have taken its last step, and would not hear of it
            # This rank may be anywhere, and others wait for parameters that do not come.
            unit.mesh.watchdog.fail(self.failure)
            raise self.failure from error

    def _update(self, update: Update) -> Any:
        unit, placement = update.unit, update.unit.placement
        self._read_ahead()
        with unit.acquired(changed=True, step=True, in_update=True):
            self._ahead.remove(unit)
            self._read_ahead()  # meanwhile others may have been written
            self.on_update("update", unit.plan.name)
            grad = update.grad.to(placement.update_device)
            self._rule.update(unit, grad, update.group, update.factor, self.threads)
            with placement.copies.entered():
                unit.masters.publish()
        if update.publish:
            unit.publish(after_update=True)
        self.on_update("done", unit.plan.name)
        return placement.copies.record_event()

    def _read_ahead(self) -> None:
        """Begin to bring the state of as many units as there is room for, in order; behind the last one the first."""
        for later in (*self._ahead, *self._all):
            if not later.placement.state_store.fetch():
                break


def snapshot(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group as they are now; schedulers write into tensors and lists, too."""
    given = {key: value for key, value in group.items() if key != "params"}
    tensors = {key: value.detach().clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
    return copy.deepcopy({key: value for key, value in given.items() if key not in tensors}) | tensors


def last_words(units: Sequence[Unit]) -> None:
    """Before this process ends by itself, have its last parameters reach those ranks that still want to read them.

    The messages of a process that is gone are lost with it. One that dies of an exception does not wait for others.
    """
    held = [weakref.ref(unit) for unit in units]
    owner = os.getpid()

    def speak() -> None:
        if owner != os.getpid() or getattr(sys, "last_value", None) is not None:
            return
        for unit in filter(None, (ref() for ref in held)):
            try:
                unit.wait_sent()
            except RuntimeError:
                return  # others are gone, or the update has failed: nobody waits for anything of ours

    atexit.register(speak)
    weakref.finalize(units[0], atexit.unregister, speak).atexit = False


def _ignore(what: str, unit: str) -> None:
    """The default of `Updates.on_update`."""
