"""Norms of each unit's gradient, parameters and update, without a wait for the device or an extra message.

Each rank squares its span of a unit during the update. The sums stay where they are computed until the next step,
which reads and sends them with its own norm. So they are known one step later.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from zero.core.unit import Unit
from zero.core.unit_table import UnitTable
from zero.kernels import cuda
from zero.kernels.norm import sum_squares_into
from zero.optim.norm import RankReport

Squares = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class UnitNorms:
    """The norms of the trained units, at each step whose number divides by `every`; the engine passes the step."""

    def __init__(self, units: Sequence[Unit], table: UnitTable, every: int) -> None:
        self._units, self._table = units, table
        self._every = every
        self._step = 0
        self._factor: float | torch.Tensor | None = None
        self._known: dict[int, Squares] = {}  # by index of the unit, of the last step

    def begin(self, step: int) -> None:
        """Begin step `step`."""
        self._step, self._factor, self._known = step, None, {}

    def average(self, factor: float | torch.Tensor) -> None:
        """The step's factor from the sums in `unit.gradients` to the average: it is not skipped."""
        self._factor = factor

    @contextlib.contextmanager
    def of(self, unit: Unit, grad: torch.Tensor) -> Iterator[None]:
        """Around the update of a unit, whose state is acquired, by `grad` [n], the sum of its gradients."""
        if self._step % self._every:
            yield
            return
        gradient, before = _squares(unit.counted(grad)), unit.counted(unit.shard.master.values()).clone()
        yield
        after = unit.counted(unit.shard.master.values())
        self._known[unit.index] = gradient * self._factor**2, _squares(after), _squares(before.sub_(after))

    def take(self, step: int) -> tuple[float | torch.Tensor, ...]:
        """Three sums of squares of each unit of the table in the last step, if it was due, for the report at `step`.

        fp64 [] on a GPU, else numbers; 0 for units that this rank has not. Waits for updates that still run beside the
        training loop.
        """
        for unit in self._units:
            unit.shard.settle()
        # The squares were already taken, or a checkpoint was loaded, or the step was not due or skipped.
        if self._step != step - 1 or self._factor is None or self._step % self._every:
            return ()
        own = [unit.index for unit in self._units]
        at = {place: self._known[index] for place, index in zip(self._table.places, own, strict=True)}
        sums = [each for place in range(len(self._table.names)) for each in at.get(place, (0.0, 0.0, 0.0))]
        return tuple(each if _waits(each) else float(each) for each in sums)

    def forget(self) -> None:
        """Drop the norms of the current step, because it is skipped."""
        self._factor = None

    def norms(self, reports: Mapping[int, RankReport]) -> dict[str, tuple[float, float, float]]:
        """The norms from the ranks' reports, by unit; empty if they contain none."""
        rows = [report.squares for report in reports.values()]
        sums = [math.sqrt(sum(column)) for column in zip(*rows, strict=True)]
        return {name: tuple(sums[3 * i : 3 * i + 3]) for i, name in enumerate(self._table.names) if sums}


def _waits(value: float | torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and cuda.reads_wait(value.device)


def _squares(values: torch.Tensor) -> torch.Tensor:
    sums = torch.empty((), dtype=torch.float64, device=values.device)
    sum_squares_into(values, sums)
    return sums
