"""The step time of a run whose state rests off the device, from what each unit takes where: a simulation of events.

Six things work side by side, each on one job after the other in a fixed order: the device, a lane of copies down from
it, the host's updates, a lane of copies up to it, reads from a drive and writes to it. A job begins when the worker is
free and all it waits for is there. So a step is a longest path through jobs, and a run of steps settles at the mean of
the longest cycle, which no worker can undercut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

_STEPS = 10  # that are simulated, the first half of them so that what follows is like any later step

DEVICE, DOWN, HOST, UP, READ, WRITE = "device", "down", "host", "up", "read", "write"
DRIVE = frozenset({READ, WRITE})  # one drive does both


class UnitTimes(NamedTuple):
    """Seconds that one unit takes in each of the things that are done with it in a step; 0 for what is not done.

    forward, backward: computed on the device;
    fetch:   of parameters that rest off the device, before each of the two; none if they rest there;
    down:    the reduced gradient to the host;
    stay:    the optimizer's step where the device computes it, else:
    read, update, write: state from the drive, the step on the host, state back to the drive;
    up:      new parameters to the device, where they rest.
    """

    forward: float = 0.0
    backward: float = 0.0
    fetch: float = 0.0
    down: float = 0.0
    stay: float = 0.0
    read: float = 0.0
    update: float = 0.0
    write: float = 0.0
    up: float = 0.0


class Prediction(NamedTuple):
    """Seconds of one step, and how many of them each worker is busy; the device waits for the rest of them."""

    step: float
    busy: dict[str, float]

    @property
    def wait(self) -> float:
        """Seconds of the step in which the device has nothing to do."""
        return max(0.0, self.step - self.busy[DEVICE])


def predict(
    units: Sequence[UnitTimes],
    norm: float = 0.0,
    ahead: int = 1,
    slots: int = 4,
    same: Sequence[Collection[str]] = (DRIVE,),
) -> Prediction:
    """Simulate steps until they are alike.

    units: in order of the forward; the backward goes the other way, updates go in order of the forward.
    norm:  seconds of the device between the backward and the first update.
    ahead: how many units are fetched before their use.
    slots: how many units' state from the drive is in memory at once.
    same:  workers that share what they work with, such as cores: together they take at least the sum of their times.
    """
    busy = _busy(units, norm)
    run = _Run(units, norm, ahead, slots)
    starts = [run.step() for _ in range(_STEPS + 1)]
    half = _STEPS // 2
    step = (starts[-1] - starts[half]) / (_STEPS - half)
    # Where two cycles are nearly as long as each other, steps become alike only slowly: the bounds hold at once.
    shared = [sum(busy[name] for name in group) for group in same]
    return Prediction(max(step, *busy.values(), *shared), busy)


def _busy(units: Sequence[UnitTimes], norm: float) -> dict[str, float]:
    return {
        DEVICE: norm + math.fsum(unit.forward + unit.backward + unit.stay for unit in units),
        DOWN: math.fsum(unit.down for unit in units),
        HOST: math.fsum(unit.update for unit in units),
        UP: math.fsum(unit.up + 2 * unit.fetch for unit in units),
        READ: math.fsum(unit.read for unit in units),
        WRITE: math.fsum(unit.write for unit in units),
    }


class _Run:
    """Steps, one after the other; all times are seconds since the first began."""

    def __init__(self, units: Sequence[UnitTimes], norm: float, ahead: int, slots: int) -> None:
        self._units = units
        self._norm = norm
        self._ahead, self._slots = max(1, ahead), max(1, slots)
        self._free = dict.fromkeys((DEVICE, DOWN, HOST, UP, READ, WRITE), 0.0)
        self._shown = [0.0] * len(units)  # when the parameters of the last step are where they rest
        self._stored = [0.0] * len(units)  # when the state of the last step is where it rests
        self._used: list[float] = []  # when the uses of parameters began, forward and backward

    def step(self) -> float:
        """Simulate one; returns when its forward could begin."""
        start = self._free[DEVICE]
        self._used = []
        for index, unit in enumerate(self._units):
            self._use(index, unit.forward)
        landed = [0.0] * len(self._units)
        for index in reversed(range(len(self._units))):
            end = self._use(index, self._units[index].backward)
            landed[index] = self._do(DOWN, self._units[index].down, end)
        ready = self._do(DEVICE, self._norm)
        for index, unit in enumerate(self._units):
            if unit.stay:
                self._do(DEVICE, unit.stay)
            else:
                self._update(index, unit, max(ready, landed[index]), ready)
        return start

    def _use(self, index: int, seconds: float) -> float:
        """The device works with the parameters of a unit; when it has ended."""
        there, fetch = self._shown[index], self._units[index].fetch
        if fetch:
            room = self._used[-self._ahead] if len(self._used) >= self._ahead else 0.0
            there = self._do(UP, fetch, max(there, room))
        self._used.append(max(self._free[DEVICE], there))
        return self._do(DEVICE, seconds, there)

    def _update(self, index: int, unit: UnitTimes, gradient: float, begun: float) -> None:
        before = index - self._slots
        room = self._stored[before] if before >= 0 else 0.0
        state = self._do(READ, unit.read, max(begun, room, self._stored[index])) if unit.read else begun
        done = self._do(HOST, unit.update, max(state, gradient)) if unit.update else gradient
        self._stored[index] = self._do(WRITE, unit.write, done) if unit.write else done
        self._shown[index] = self._do(UP, unit.up, done) if unit.up else done

    def _do(self, worker: str, seconds: float, after: float = 0.0) -> float:
        """A job of this worker, not before `after`; when it has ended."""
        self._free[worker] = end = max(self._free[worker], after) + seconds
        return end
