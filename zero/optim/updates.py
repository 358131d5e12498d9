"""Optimizer steps that run beside the training loop: one unit after the other, in the order of their next use.

The host's update of one unit reads its state ahead, computes, shows the new parameters to the device and writes the
state back, while the loop goes on with the next forward; that waits for each unit when it comes to it. The numbers are
those of a step that nobody overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from zero.core.unit import Unit
from zero.optim.rules import Rule


class Update(NamedTuple):
    """One unit's part of a step. It keeps the gradient alive, and what the hyperparameters were at the step."""

    unit: Unit
    grad: torch.Tensor
    group: Mapping[str, Any]
    factor: float
    gather: bool  # to send the new parameters to the other ranks


class Updates:
    """A thread that takes updates in order; after one that failed it refuses the rest.

    failure: what the first failed update raised, or None;
    threads: how many compute one update;
    seen:    called with (what, unit name) as updates go through "update" and "done"; for tests and measurements.
    """

    def __init__(self, rule: Rule, threads: int) -> None:
        self.failure: BaseException | None = None
        self.threads = threads
        self.seen: Callable[[str, str], None] = _nobody
        self._rule = rule
        # One thread: it ends when nobody holds us any more.
        self._worker = ThreadPoolExecutor(1, "zero-updates")
        self._ahead: list[Unit] = []  # units whose state is wanted soon, in order
        self._all: list[Unit] = []  # of the last step

    def submit(self, updates: Sequence[Update]) -> list[Future[Any]]:
        """Have these run; the future of each is that of the event after which the device has its result."""
        self._all = [update.unit for update in updates]
        self._ahead += self._all
        return [self._worker.submit(self._run, update) for update in updates]

    def close(self) -> None:
        """Wait until all have run, whether they failed or not."""
        self._worker.shutdown(wait=True)

    @torch.no_grad()
    def _run(self, update: Update) -> Any:
        unit = update.unit
        if self.failure is not None:
            raise RuntimeError(
                f"unit '{unit.plan.name}' was not updated, because an update before it failed: {self.failure}"
            )
        try:
            return self._update(update)
        except BaseException as error:
            self.failure = error
            raise

    def _update(self, update: Update) -> Any:
        unit, home = update.unit, update.unit.home
        self._read_ahead()
        with unit.lent(written=True, step=True):
            self._ahead.remove(unit)
            self._read_ahead()  # meanwhile others may have been written
            self.seen("update", unit.plan.name)
            grad = update.grad.to(home.updates)
            self._rule.update(unit, grad, update.group, update.factor, self.threads)
            with home.up.open():
                unit.push()
        if update.gather:
            unit.send(pushed=True)
        self.seen("done", unit.plan.name)
        return home.up.mark()

    def _read_ahead(self) -> None:
        """Begin to bring the state of as many units as there is room for, in order; behind the last one the first."""
        for later in (*self._ahead, *self._all):
            if not later.home.states.fetch():
                break


def _nobody(what: str, unit: str) -> None:
    """The default of `Updates.seen`."""
