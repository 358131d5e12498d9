"""The step time of a run whose state rests off the device, from measured rates: a simulation of events.

Six things work side by side, each on one job after the other in a fixed order: the device, a stream of copies down from
it, the host's updates, a stream of copies up to it, reads from a drive and writes to it. A job begins when the worker
is free and all it waits for is there. So a step is a longest path through jobs, and a run of steps settles at the mean
of the longest cycle, which no worker can undercut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from zero.kernels.formulas import Adam, Formula, Lion, Sgd
from zero.kernels.moments import Moment
from zero.kernels.step import step
from zero.memory.host_bytes import record_nbytes, shard_nbytes
from zero.plan.formats import Formats
from zero.plan.placement import Placement, Where, is_updated
from zero.plan.units import UnitPlan

_STEPS = 10  # that are simulated, the first half of them so that what follows is like any later step

DEVICE, DOWN, HOST, UP, READ, WRITE = "device", "down", "host", "up", "read", "write"
DRIVE = frozenset({READ, WRITE})  # one drive does both

NUMEL = 1 << 23  # of an update that is tried out
COPIED = 1 << 27  # bytes of a copy that is tried out; page-locked
TURNS = 3  # after one that warms up; the fastest counts, for whatever else the machine does only adds

# By how many moments they keep; the bytes decide, and they are the same in every formula of as many.
_FORMULAS: tuple[Formula, ...] = (Sgd(1e-3), Lion(1e-3), Adam(1e-3))


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


class Rates(NamedTuple):
    """How fast one rank of a machine is: bytes per second; updates in elements of this format per second.

    What is infinite takes no time: copies where the device's memory is the host's, and a drive that was not measured.
    """

    down: float = math.inf
    up: float = math.inf
    host_update: float = math.inf
    device_update: float = math.inf
    read: float = math.inf
    write: float = math.inf


class UnitSizes(NamedTuple):
    """What decides over the bytes of a unit, beside its plan: see `record`; `gradients`, their dtype at rest."""

    rank: int
    parts: int
    formats: Formats
    gradients: str


def unit_times(
    units: Sequence[UnitPlan],
    placements: Sequence[Placement],
    sizes: UnitSizes,
    rates: Rates,
    forward: float = 0.0,
    backward: float = 0.0,
) -> list[UnitTimes]:
    """What one rank's part of each unit takes; `forward` and `backward` of the whole are shared out by elements."""
    whole = sum(unit.layout.numel for unit in units) or 1
    found = []
    for unit, placement in zip(units, placements, strict=True):
        share, shard = unit.layout.numel / whole, unit.layout.numel // sizes.parts
        away = is_updated(unit) and placement.optimizer is not Where.DEVICE
        here = is_updated(unit) and not away
        shown = shard_nbytes(unit, sizes.parts, unit.dtype)
        rests = placement.params is Where.DEVICE
        filed = away and placement.optimizer is Where.FILE
        kept = sum(record_nbytes(unit, sizes.rank, sizes.parts, sizes.formats, True)) if filed else 0
        drive = shown if placement.params is Where.FILE else 0
        found.append(
            UnitTimes(
                forward=forward * share,
                backward=backward * share,
                fetch=0.0 if rests else shown / rates.up + drive / rates.read,
                down=shard_nbytes(unit, sizes.parts, sizes.gradients) / rates.down if away else 0.0,
                stay=shard / rates.device_update if here else 0.0,
                read=kept / rates.read,
                update=shard / rates.host_update if away else 0.0,
                write=(kept + (drive if away else 0)) / rates.write,
                up=shown / rates.up if away and rests else 0.0,
            )
        )
    return found


def measure(device: torch.device, dtype: torch.dtype, formats: Formats, threads: int, numel: int = NUMEL) -> Rates:
    """The rates of this process; takes about a second where the compiled kernels are there.

    `dtype`: of the parameters and gradients; `threads`: of the host's update.
    """
    host = _update_rate(torch.device("cpu"), dtype, formats, threads, numel)
    if device.type == "cpu":
        # The device's step runs with torch's threads.
        alike = threads == torch.get_num_threads()
        here = host if alike else _update_rate(device, dtype, formats, torch.get_num_threads(), numel)
        return Rates(host_update=host, device_update=here)
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    pinned = torch.empty(COPIED, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return Rates(
        down=COPIED / _seconds(lambda: pinned.copy_(there), device),
        up=COPIED / _seconds(lambda: there.copy_(pinned), device),
        host_update=host,
        device_update=_update_rate(device, dtype, formats, None, numel),
    )


def _update_rate(device: torch.device, dtype: torch.dtype, formats: Formats, threads: int | None, numel: int) -> float:
    """Elements per second of one step of the optimizer."""
    formula = _FORMULAS[min(formats.states, 2)]
    param = torch.zeros(numel, dtype=dtype, device=device)
    grad = torch.zeros(numel, dtype=dtype, device=device)
    remainder = formats.master == "remainder" and dtype == torch.bfloat16
    master = param if dtype == torch.float32 else torch.zeros(
        numel, dtype=torch.int16 if remainder else torch.float32, device=device
    )  # fmt: skip
    moments = tuple(Moment.filled(numel, formats.moments, 0.0, device, signed) for signed in formula.signed)
    shown = None if master is param else param

    def run() -> None:
        step(formula, master, moments, grad, shown, step=10, grad_scale=1.0, key=0, first=0, threads=threads)

    return numel / _seconds(run, device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(TURNS + 1):
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begun)
    return max(min(found[1:]), 1e-9)
