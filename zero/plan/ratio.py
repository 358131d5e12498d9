"""How much optimizer state stays on the device when part of it may leave: what fits and makes the step faster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zero.plan.formats import ITEMSIZE, Formats
from zero.plan.host import gradient_nbytes, parameter_nbytes, record
from zero.plan.pipeline import DEVICE, DRIVE, HOST, Prediction, UnitTimes, predict
from zero.plan.placement import Placement, Where, is_updated, place
from zero.plan.units import UnitPlan

# What stays on the device is memory that the user wanted to have: it must gain as much, as a part of the best time.
_WORTH = 0.05
_CANDIDATES = 32  # numbers of units that are tried; more would change the step by less than is measured


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


class Sizes(NamedTuple):
    """What decides over the bytes of a unit, beside its plan: see `record`; `gradients`, their dtype at rest."""

    rank: int
    parts: int
    formats: Formats
    gradients: str


class Choice(NamedTuple):
    """What was chosen: see `place` for the ratio; elements and bytes of one rank that stay; and the step predicted."""

    ratio: float
    numel: int
    nbytes: int
    prediction: Prediction


def unit_times(
    units: Sequence[UnitPlan],
    placements: Sequence[Placement],
    sizes: Sizes,
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
        shown = parameter_nbytes(unit, sizes.parts)
        rests = placement.params is Where.DEVICE
        filed = away and placement.optimizer is Where.FILE
        kept = record(unit, sizes.rank, sizes.parts, sizes.formats, True).nbytes if filed else 0
        drive = shown if placement.params is Where.FILE else 0
        found.append(
            UnitTimes(
                forward=forward * share,
                backward=backward * share,
                fetch=0.0 if rests else shown / rates.up + drive / rates.read,
                down=gradient_nbytes(unit, sizes.parts, sizes.gradients) / rates.down if away else 0.0,
                stay=shard / rates.device_update if here else 0.0,
                read=kept / rates.read,
                update=shard / rates.host_update if away else 0.0,
                write=(kept + (drive if away else 0)) / rates.write,
                up=shown / rates.up if away and rests else 0.0,
            )
        )
    return found


def choose_ratio(
    units: Sequence[UnitPlan],
    sizes: Sizes,
    optimizer: Where,
    params: Where,
    rates: Rates,
    room: float,
    apart: bool,
    forward: float = 0.0,
    backward: float = 0.0,
) -> Choice:
    """The ratio for `place` whose step is shortest by prediction, and of those about as short the largest.

    room:  bytes of the device that optimizer state and gradients of units that stay may take on this rank;
    apart: the device computes with something else than the host, so that the two work at the same time.
    forward, backward: seconds, where they are known; unknown ones hide nothing of the update.
    """
    same = (DRIVE,) if apart else (DRIVE, (DEVICE, HOST))
    found = []
    for ratio in _ratios(units):
        placements = place(units, sizes.parts, optimizer, params, ratio)
        stay = [
            unit
            for unit, placement in zip(units, placements, strict=True)
            if is_updated(unit) and placement.optimizer is Where.DEVICE
        ]
        nbytes = sum(_device_nbytes(unit, sizes) for unit in stay)
        if nbytes > room:
            break
        times = unit_times(units, placements, sizes, rates, forward, backward)
        numel = sum(unit.layout.numel // sizes.parts for unit in stay)
        found.append(Choice(ratio, numel, nbytes, predict(times, same=same)))
    best = min(choice.prediction.step for choice in found)
    return next(choice for choice in found if choice.prediction.step <= best * (1 + _WORTH))


def _ratios(units: Sequence[UnitPlan]) -> Iterator[float]:
    """Ratios with which 0, 1, 2... of the first trained units stay, or fewer numbers of them; the last ratio is 0."""
    trained = [unit.layout.numel for unit in units if is_updated(unit)]
    stride = max(1, math.ceil(len(trained) / _CANDIDATES))
    yield 1.0
    for count in range(stride, len(trained), stride):
        # Half an element more, so that no rounding of the ratio leaves the last unit out.
        yield max(0.0, 1.0 - (sum(trained[:count]) + 0.5) / sum(trained))
    if trained:
        yield 0.0


def _device_nbytes(unit: UnitPlan, sizes: Sizes) -> int:
    """Bytes of a unit that stays: masters, moments and the gradient until it is used."""
    kept = record(unit, sizes.rank, sizes.parts, sizes.formats, False).nbytes
    return kept + ITEMSIZE[sizes.gradients] * (unit.layout.numel // sizes.parts)
