"""The update of a unit that runs beside the training loop, as the unit waits for it."""

from __future__ import annotations

import threading

import torch

from zero.core.mesh import Axis
from zero.memory.copy_stream import wait_event
from zero.memory.pending_update import PendingUpdate
from zero.plan.units import UnitPlan


class Updated:
    """Mixed into `Unit`. Several threads may wait at once; `_changing` is held where `pending` changes."""

    plan: UnitPlan
    cut: bool
    full: torch.Tensor
    pending: PendingUpdate | None
    _axis: Axis
    _changing: threading.Lock

    @property
    def updating(self) -> bool:
        """Whether `gather` would have to wait for an update that runs beside us."""
        pending = self.pending
        return pending is not None and not pending.future.done()

    def defer(self, pending: PendingUpdate) -> None:
        """An update of the shard runs beside us. Where parameters are not cut they look released until it is over."""
        with self._changing:
            self.pending = pending
            if not self.cut:
                self._veil()

    def settle(self) -> None:
        """Wait until no update of the shard runs any more; raises what it raised, and again each time."""
        while (pending := self.pending) is not None:
            if pending.forked and (self._axis.size > 1 or not pending.future.done()):
                raise RuntimeError(
                    f"unit '{self.plan.name}' (rank {self._axis.rank}) was being updated when this process was forked, "
                    "and what it waits for comes in the parent process only; read the parameters there, before the fork"
                )
            wait_event(pending.result(), self.full.device)
            with self._changing:
                if self.pending is pending:  # while one thread waited, another may have begun the next update
                    self.pending = None

    def leave(self) -> None:
        """No update runs any more; one that has failed will not be heard of again."""
        if self.pending is not None and self.pending.future.exception() is None:
            self.settle()
        self.pending = None
