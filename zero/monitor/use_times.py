"""How long gathers take and how long units compute, as the first two backwards of an engine show it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from zero.core import comm
from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit
from zero.monitor.taps import Stamp, now, seconds
from zero.plan.in_time import UnitSeconds

# A gather takes longer beside reductions, which share the link; and one that is late costs more than one that is early.
MARGIN = 2.0


class UseTimes:
    """Takes the times of uses, and has parameters gathered in time by them; nothing is left of it afterwards.

    Up to the first backward's end nothing is gathered ahead, so that a use waits for the whole of its gather. In the
    second one the device is warm, and what it computes is timed. With the third one's end all ranks take the times of
    rank 0, as they must gather in one order; on a GPU the host waits there, once.
    """

    def __init__(self, sharded: ShardedModule) -> None:
        self._sharded = sharded
        self._prefetcher = sharded.prefetcher
        self._device = sharded.device
        self._use = self._prefetcher.use
        self._begun: tuple[int, bool, Stamp] | None = None  # what computes: the unit, whether in a backward, since when
        self._gathers: dict[int, list[tuple[Stamp, Stamp]]] = defaultdict(list)
        self._computes: dict[tuple[int, bool], list[tuple[Stamp, Stamp]]] = defaultdict(list)
        self._backwards = 0
        self._prefetcher.use = self._timed  # type: ignore[method-assign]
        sharded.reducer.on_flush.append(self._ended)

    def _timed(self, units: Sequence[Unit]) -> None:
        uses, start = self._prefetcher.forecast.uses, now(self._device)
        known = len(uses)
        self._use(units)
        fresh = uses[known:]
        if not fresh:
            return
        end = now(self._device)
        for use in fresh if not self._backwards else ():
            self._gathers[use.unit].append((start, end))
        self._computed(start)
        self._begun = fresh[-1].unit, fresh[-1].backward, end

    def _computed(self, end: Stamp) -> None:
        if self._begun is not None and self._backwards:
            index, back, since = self._begun
            self._computes[index, back].append((since, end))
        self._begun = None

    def _ended(self) -> None:
        """A backward has ended."""
        self._computed(now(self._device))
        self._backwards += 1
        if self._backwards == 2:
            del self._prefetcher.use
        elif self._backwards == 3:
            self._sharded.reducer.on_flush.remove(self._ended)
            self._prefetcher.forecast.gather_in_time(self._agreed())

    def _agreed(self) -> list[UnitSeconds]:
        """What rank 0 has seen."""
        # The first gather of all connects ranks, and what comes between two uses is not always the model: the shortest
        # counts. A unit whose gather was not seen is gathered as early as the limits allow.
        rows = [
            [
                MARGIN * _least(self._gathers[unit.index], math.inf),
                *(_least(self._computes[unit.index, back], 0.0) for back in (False, True)),
            ]
            for unit in self._sharded.units
        ]
        times = torch.tensor(rows, dtype=torch.float64, device=self._device)
        comm.broadcast(times, 0, self._sharded.world, "times of gathers")
        return [UnitSeconds(*row) for row in times.tolist()]


def _least(spans: Sequence[tuple[Stamp, Stamp]], none: float) -> float:
    for _, end in spans:
        if not isinstance(end, float):
            end.synchronize()
    return min((seconds(*span) for span in spans), default=none)
