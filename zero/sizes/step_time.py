"""The time of a step, from what each unit takes of each worker: a simulation of events.

Seven things work side by side, each on one job after the other in a fixed order: the device, the link between ranks, a
stream of copies down from the device, the host's updates, a stream of copies up to it, reads from a drive and writes to
it. A job begins when the worker is free and all it waits for is there. So a step is a longest path through jobs, and a
run of steps settles at the mean of the longest cycle, which no worker can undercut.

What waits for what is as the engine does it: parameters are gathered some units ahead of their use, a gradient is
reduced while the units before it compute, the norm waits for all gradients, updates go in order of the forward, and the
next forward waits for each unit when it comes to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from zero.plan.memory import SLOTS

_STEPS = 10  # that are simulated, the first half of them so that what follows is like any later step

DEVICE, LINK, DOWN, HOST, UP, READ, WRITE = WORKERS = ("device", "link", "down", "host", "up", "read", "write")
DRIVE = frozenset({READ, WRITE})  # one drive does both


class UnitTimes(NamedTuple):
    """Seconds that one unit takes in each of the things that are done with it in a step; 0 for what is not done.

    forward, backward: computed on the device, in each micro-batch;
    fetch:   of parameters that rest off the device, before each of the two; none if they rest there;
    down:    the reduced gradient to the host;
    stay:    the optimizer's step where the device computes it, else:
    read, update, write: state from the drive, the step on the host, state back to the drive;
    up:      new parameters to the device, where they rest;
    gather, regather: parameters from other ranks before the forward, and before the backward;
    reduce:  the gradient's sum over the ranks;
    publish: new parameters to other ranks;
    bring, back: state that streams, up to the device, where the step follows in the same stream, and down again.
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
    gather: float = 0.0
    regather: float = 0.0
    reduce: float = 0.0
    publish: float = 0.0
    bring: float = 0.0
    back: float = 0.0


class Prediction(NamedTuple):
    """Seconds of one step, and how many of them each worker is busy."""

    step: float
    busy: dict[str, float]


class Pace(NamedTuple):
    """How a step goes about its units.

    ahead: how many units are fetched before their use; slots: how many units' state from the drive is in memory at
    once; micro_batches: forwards and backwards of a step; each: whether gradients are reduced after each of them.
    """

    ahead: int = 1
    slots: int = 4
    micro_batches: int = 1
    each: bool = True


def predict(
    units: Sequence[UnitTimes],
    norm: float = 0.0,
    pace: Pace = Pace(),  # noqa: B008 -- it cannot change
    same: Sequence[Collection[str]] = (DRIVE,),
    steps: int = _STEPS,
) -> Prediction:
    """Simulate steps until they are alike.

    units: in order of the forward; the backward goes the other way, updates go in order of the forward.
    norm:  seconds of the device between the backward and the first update.
    same:  workers that share what they work with, such as cores: together they take at least the sum of their times.
    """
    passes = pace.micro_batches
    step, busy = _settled(units, norm, pace._replace(micro_batches=min(passes, 2)), steps)
    if passes > 2:  # each further one takes what the second has added
        first, busy_in_first = _settled(units, norm, pace._replace(micro_batches=1), steps)
        step += (passes - 2) * (step - first)
        busy = {worker: each + (passes - 2) * (each - busy_in_first[worker]) for worker, each in busy.items()}
    # Where two cycles are nearly as long as each other, steps become alike only slowly: the bounds hold at once.
    shared = [sum(busy[name] for name in group) for group in same]
    return Prediction(max(step, *busy.values(), *shared), busy)


def _settled(units: Sequence[UnitTimes], norm: float, pace: Pace, steps: int) -> tuple[float, dict[str, float]]:
    """The mean step, once they are alike, and how long each worker is busy in one."""
    run = _Simulation(units, norm, pace)
    starts = [run.step() for _ in range(steps + 1)]
    half = steps // 2
    return (starts[-1] - starts[half]) / (steps - half), {at: each / (steps + 1) for at, each in run.busy.items()}


class _Simulation:
    """Steps, one after the other; all times are seconds since the first began."""

    def __init__(self, units: Sequence[UnitTimes], norm: float, pace: Pace) -> None:
        self._units = units
        self._norm = norm
        self._pace = pace
        self.busy = dict.fromkeys(WORKERS, 0.0)
        self._free = dict.fromkeys(WORKERS, 0.0)
        self._shown = [0.0] * len(units)  # when the parameters of the last step are where they rest
        self._stored = [0.0] * len(units)  # when the state of the last step is where it rests
        self._landed = [0.0] * len(units)  # when the gradient is where the update reads it

    def step(self) -> float:
        """Simulate one; returns when its forward could begin."""
        start = self._free[DEVICE]
        for left in reversed(range(self._pace.micro_batches)):
            self._micro_batch(self._pace.each or not left)
        reduced = self._free[LINK] if any(unit.reduce for unit in self._units) else 0.0
        ready = self._do(DEVICE, self._norm, reduced)
        for index, unit in enumerate(self._units):
            if unit.stay:
                self._show(index, self._do(DEVICE, unit.stay))
            else:
                self._update(index, unit, max(ready, self._landed[index]), ready)
        return start

    def _micro_batch(self, reduces: bool) -> None:
        count = len(self._units)
        uses = [(index, unit.forward, unit.gather) for index, unit in enumerate(self._units)]
        uses += [(index, self._units[index].backward, self._units[index].regather) for index in reversed(range(count))]
        there: list[float] = []  # when the parameters of each use are there, as far as they were asked for
        for position, (index, seconds, _) in enumerate(uses):
            if position == len(there):
                there.append(self._bring(uses[position], self._free[DEVICE]))
            begun = max(self._free[DEVICE], there[position])
            for use in uses[len(there) : position + 1 + self._pace.ahead]:
                there.append(self._bring(use, begun))
            end = self._do(DEVICE, seconds, begun)
            if position >= count and reduces:
                unit = self._units[index]
                reduced = self._do(LINK, unit.reduce, end) if unit.reduce else end
                self._landed[index] = self._do(DOWN, unit.down, reduced) if unit.down else reduced

    def _bring(self, use: tuple[int, float, float], asked: float) -> float:
        """When the parameters of a use are there, which were asked for then."""
        index, _, gather = use
        there, fetch = max(asked, self._shown[index]), self._units[index].fetch
        there = self._do(UP, fetch, there) if fetch else self._shown[index]
        return self._do(LINK, gather, max(there, asked)) if gather else there

    def _update(self, index: int, unit: UnitTimes, gradient: float, begun: float) -> None:
        room = self._stored_before(index, max(1, self._pace.slots))
        state = self._do(READ, unit.read, max(begun, room, self._stored[index])) if unit.read else begun
        done = self._do(HOST, unit.update, max(state, gradient)) if unit.update else max(state, gradient)
        if unit.bring:
            done = self._do(UP, unit.bring, max(done, self._stored_before(index, SLOTS), self._stored[index]))
        stored = self._do(DOWN, unit.back, done) if unit.back else done
        self._stored[index] = self._do(WRITE, unit.write, stored) if unit.write else stored
        self._show(index, self._do(UP, unit.up, done) if unit.up else done)

    def _stored_before(self, index: int, units: int) -> float:
        """When the state of the unit so many units before this one is where it rests."""
        return self._stored[index - units] if index >= units else 0.0

    def _show(self, index: int, done: float) -> None:
        publish = self._units[index].publish
        self._shown[index] = self._do(LINK, publish, done) if publish else done

    def _do(self, worker: str, seconds: float, after: float = 0.0) -> float:
        """A job of this worker, not before `after`; when it has ended."""
        self.busy[worker] += seconds
        self._free[worker] = end = max(self._free[worker], after) + seconds
        return end
