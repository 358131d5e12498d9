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
from zero.kernels import cuda
from zero.kernels.norm import sum_squares_into
from zero.optim.norm import RankReport

Squares = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class UnitNorms:
    """The norms of the trained `units`, at each step whose number divides by `every`; the engine passes the step."""

    def __init__(self, units: Sequence[Unit], every: int) -> None:
        self._units = units
        self._every = every
        self._step = 0
        self._factors: Mapping[int, float | torch.Tensor] = {}
        self._known: dict[str, Squares] = {}  # of the last step, if it was due and not skipped

    def begin(self, step: int) -> None:
        """Begin step `step`."""
        self._step, self._known = step, {}

    def average(self, factors: Mapping[int, float | torch.Tensor]) -> None:
        """The step's factors, by index of the unit, from the sums in `unit.gradients` to the average."""
        self._factors = factors

    @contextlib.contextmanager
    def of(self, unit: Unit, grad: torch.Tensor) -> Iterator[None]:
        """Around the update of a unit, whose state is acquired, by `grad` [n], the sum of its gradients."""
        if self._step % self._every:
            yield
            return
        gradient, before = _squares(unit.counted(grad)), unit.counted(unit.shard.master.values()).clone()
        yield
        factor = self._factors[unit.index]
        after = unit.counted(unit.shard.master.values())
        self._known[unit.plan.name] = gradient * factor**2, _squares(after), _squares(before.sub_(after))

    def take(self, step: int) -> tuple[float | torch.Tensor, ...]:
        """Three sums of squares of each unit in the last step, if it was due, for this rank's report at step `step`.

        fp64 [] on a GPU, else numbers; equally many on all ranks. Waits for updates that still run beside the training
        loop.
        """
        for unit in self._units:
            unit.shard.settle()
        if self._step != step - 1:  # the squares were already taken, or a checkpoint was loaded
            return ()
        sums = [each for unit in self._units for each in self._known.get(unit.plan.name, ())]
        return tuple(each if cuda.reads_wait(each.device) else each.item() for each in sums)

    def forget(self) -> None:
        """Drop the norms of the current step, because it is skipped."""
        self._known = {}

    def norms(self, reports: Mapping[int, RankReport]) -> dict[str, tuple[float, float, float]]:
        """The norms from the ranks' reports, by unit; empty if they contain none."""
        rows = [report.squares for report in reports.values()]
        sums = [math.sqrt(sum(column)) for column in zip(*rows, strict=True)]
        return {unit.plan.name: tuple(sums[3 * i : 3 * i + 3]) for i, unit in enumerate(self._units) if sums}


def _squares(values: torch.Tensor) -> torch.Tensor:
    sums = torch.empty((), dtype=torch.float64, device=values.device)
    sum_squares_into(values, sums)
    return sums
