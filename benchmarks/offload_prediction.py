"""The step time of a run whose state rests off the device: rates that are measured, for zero/sizes/step_time.py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zero.kernels.formulas import Adam, Formula, Lion, Sgd
from zero.kernels.moments import Moment
from zero.kernels.step import step
from zero.plan.formats import Formats
from zero.plan.memory import Scheme
from zero.plan.placement import Where, is_updated
from zero.plan.units import UnitPlan, of_each
from zero.sizes.step_time import UnitTimes

NUMEL = 1 << 23  # of an update that is tried out
COPIED = 1 << 27  # bytes of a copy that is tried out; page-locked
TURNS = 3  # after one that warms up; the fastest counts, for whatever else the machine does only adds

# By how many moments they keep; the bytes decide, and they are the same in every formula of as many.
_FORMULAS: tuple[Formula, ...] = (Sgd(1e-3), Lion(1e-3), Adam(1e-3))


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


def unit_times(
    units: Sequence[UnitPlan],
    scheme: Scheme,
    rank: int,
    rates: Rates,
    forward: float = 0.0,
    backward: float = 0.0,
) -> list[UnitTimes]:
    """What one rank's part of each unit takes; `forward` and `backward` of the whole are shared out by elements."""
    whole = sum(unit.layout.numel for unit in units) or 1
    found = []
    parts = of_each(scheme.parts, units)
    for unit, placement, held, cut in zip(units, scheme.placements, scheme.held(units, rank), parts, strict=True):
        share, shard = unit.layout.numel / whole, unit.layout.numel // cut
        away = is_updated(unit) and not placement.used_on_device
        here = is_updated(unit) and not away
        step = shard / rates.device_update if here else 0.0
        record = held.away.record if placement.streamed else 0
        shown, drive = held.all.parameters, held.file.parameters
        rests = placement.params is Where.DEVICE
        kept = held.file.record
        found.append(
            UnitTimes(
                forward=forward * share,
                backward=backward * share,
                fetch=0.0 if rests else shown / rates.up + drive / rates.read,
                down=held.host.gradients / rates.down,
                stay=0.0 if record else step,
                read=kept / rates.read,
                update=shard / rates.host_update if away else 0.0,
                write=(kept + (drive if away else 0)) / rates.write,
                up=shown / rates.up if away and rests else 0.0,
                bring=record / rates.up + step if record else 0.0,
                back=record / rates.down,
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
