"""Norms of each unit's gradient, parameters and update, without a wait for the device or an extra message.

Each rank squares its span of a unit around the update. The sums stay where they are computed until the next step, which
reads and sends them with its own norm. So they are known one step later.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch

from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit
from zero.kernels import cuda
from zero.kernels.norm import sum_squares_into
from zero.monitor.step_record import Line
from zero.optim.norm import RankReport
from zero.optim.optimizer import ZeroOptimizer

_KINDS = ("gradient", "parameter", "update")
Squares = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class UnitNorms:
    """The norms of the trained units, at each step whose number divides by `every`."""

    def __init__(self, sharded: ShardedModule, optimizer: ZeroOptimizer, every: int) -> None:
        self._units, self._table = sharded.trained, sharded.table
        self._optimizer = optimizer
        self._every = every
        self._step = 0
        self._known: dict[int, Squares] = {}  # by index of the unit, of the last step; of the gradient's sum
        optimizer.around_updates(self.of)

    @contextlib.contextmanager
    def of(self, unit: Unit, grad: torch.Tensor) -> Iterator[None]:
        """Around the update of a unit, whose state is acquired, by `grad` [n], the sum of its gradients."""
        if self._step % self._every:
            yield
            return
        gradient, before = _squares(unit.counted(grad)), unit.counted(unit.shard.master.values()).clone()
        yield
        after = unit.counted(unit.shard.master.values())
        self._known[unit.index] = gradient, _squares(after), _squares(before.sub_(after))

    def take(self, step: int) -> tuple[float | torch.Tensor, ...]:
        """Three sums of squares of each unit of the table in the last step, if it was due; step `step` begins.

        fp64 [] on a GPU, else numbers; 0 for units that this rank has not. Waits for updates that still run beside the
        training loop.
        """
        for unit in self._units:
            unit.shard.settle()
        last, known, average = self._step, self._known, self._optimizer.average
        self._step, self._known = step, {}
        # A checkpoint was loaded, or the step was not due, or skipped.
        if last != step - 1 or average is None or last % self._every:
            return ()
        own = [known[unit.index] for unit in self._units]
        at = {
            place: (gradient * average**2, parameter, update)
            for place, (gradient, parameter, update) in zip(self._table.places, own, strict=True)
        }
        sums = [each for place in range(len(self._table.names)) for each in at.get(place, (0.0, 0.0, 0.0))]
        on_gpu = [isinstance(each, torch.Tensor) and cuda.reads_wait(each.device) for each in sums]
        return tuple(each if stays else float(each) for each, stays in zip(sums, on_gpu, strict=True))

    def line(self, reports: Mapping[int, RankReport], step: int, samples: int) -> Line:
        """The norms of a step, after so many samples, from the ranks' reports, which contain them."""
        rows = [report.squares for report in reports.values()]
        norms = [math.sqrt(sum(column)) for column in zip(*rows, strict=True)]
        units = {name: norms[3 * at : 3 * at + 3] for at, name in enumerate(self._table.names)}
        events = [
            (f"Train/Units/{unit}/{kind}_norm", value, samples)
            for unit, values in units.items()
            for kind, value in zip(_KINDS, values, strict=True)
        ]
        return Line("unit_norms", {"step": step, "units": units}, events)


def _squares(values: torch.Tensor) -> torch.Tensor:
    sums = torch.empty((), dtype=torch.float64, device=values.device)
    sum_squares_into(values, sums)
    return sums
