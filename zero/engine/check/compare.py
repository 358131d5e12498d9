"""Judging runs: how far each is from plain torch, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zero.engine.check.recording import Outcome
from zero.engine.check.runs import Run

_EPS = {"fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
_MASTER_EPS = 2.0**-23


class Difference(NamedTuple):
    """The largest absolute difference, and that over the largest absolute value."""

    absolute: float
    relative: float


class Row(NamedTuple):
    """One line of the table; the differences are from plain torch with the same accumulation."""

    run: Run
    loss: Difference | None
    norm: Difference | None
    params: Difference | None
    verdict: str
    good: bool


@dataclass(frozen=True)
class Report:
    """The result of a check: true if all is well, and a table when printed."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every run agrees with plain torch, and there was one."""
        return bool(self.rows) and all(row.good for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def closing(self) -> tuple[str, ...]:
        """What is said below the table."""
        return (*self.notes, "All is well." if self.ok else "NOT all is well.")

    def __str__(self) -> str:
        lines = cells(self.rows)
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        texts = ["  ".join([*map(str.ljust, line[:4], widths), line[4]]) for line in lines]
        texts.insert(1, "-" * max(map(len, texts)))
        return "\n".join(["Largest differences from plain torch, absolute (relative):", *texts, *self.closing])


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table as text, its head first."""
    head = ("run", "loss", "gradient norm", "parameters", "verdict")
    return [
        head,
        *((row.run.name, _shown(row.loss), _shown(row.norm), _shown(row.params), row.verdict) for row in rows),
    ]


class Yardstick(NamedTuple):
    """What rounding alone does: `off` is a run that differs from `centre` by rounding only.

    Runs are judged by their distance from `centre`, which is the fp64 run, or the plain run where there is none.
    """

    centre: Outcome
    off: Outcome


def yardstick(plain: Outcome, exact: Outcome | None, nudged: Outcome | None) -> Yardstick | None:
    """The better of the two that is there: fp64, unless it ran something else, such as other random numbers.

    None when no other plain run begins as the first one did: then nothing can be said about anything.
    """
    if exact is not None and follows(plain, exact):
        return Yardstick(exact, plain)
    return Yardstick(plain, nudged) if nudged is not None and follows(plain, nudged) else None


def follows(plain: Outcome, exact: Outcome) -> bool:
    """Whether the losses before the first update agree as far as the precision goes."""
    firsts = [(mine[0], theirs[0]) for mine, theirs in zip(plain.losses, exact.losses, strict=True) if mine and theirs]
    near = math.sqrt(_EPS[plain.dtype])
    return all(abs(mine - theirs) <= near * max(1e-6, abs(theirs)) for mine, theirs in firsts)


def failed(run: Run, why: str) -> Row:
    """The row of a run that came to nothing."""
    return Row(run, None, None, None, f"FAILED: {why}", False)


def judge(run: Run, found: Outcome, plain: Outcome, measure: Yardstick | None) -> Row:
    """The row of one run of the engine.

    "within rounding" means: at most twice as far from the yardstick's centre as the yardstick's other run is, or, where
    that is more, as its parameters are in the median, or as one rounding per step would bring it.
    """
    ours, theirs = _flat(found.losses), _flat(plain.losses)
    loss, norm = _difference(ours, theirs), _difference(found.norms, plain.norms)
    params = _largest(found, plain)
    wrong = _shape(found, plain) or _begin(found, plain)
    if wrong is None and measure is None:
        wrong = "plain torch does not repeat itself: the loss depends on more than weights, batch and seed"
    if wrong is None and found.stray is not None:
        wrong = f"parameter {found.stray} is not what it is on rank 0"
    if wrong is None:
        wrong = _first_parameter(found, measure, run.steps) or _first_number(found, measure)
    if wrong is not None:
        return Row(run, loss, norm, params, f"DIFFERS: {wrong}", False)
    # The norm is a report: torch adds its squares up in another order.
    same = ours == theirs and params is not None and params.absolute == 0
    return Row(run, loss, norm, params, "same bits" if same else "within rounding", True)


def same_bits(outcomes: Sequence[Outcome]) -> bool:
    """Whether the runs ended with the same losses and weights, bit by bit."""
    first = outcomes[0]
    return all(
        other.losses == first.losses
        and all(torch.equal(other.params[name], first.params[name]) for name in first.params)
        for other in outcomes[1:]
    )


def _shape(found: Outcome, plain: Outcome) -> str | None:
    if found.params.keys() != plain.params.keys():
        return "the parameters have other names"
    counts = [len(losses) for losses in found.losses], [len(losses) for losses in plain.losses]
    if counts[0] != counts[1] or len(found.norms) != len(plain.norms):
        return f"{counts[0]} losses on the ranks, where plain torch has {counts[1]}"
    for name, value in found.params.items():
        if value.shape != plain.params[name].shape:
            return f"parameter '{name}' has shape {tuple(value.shape)}, not {tuple(plain.params[name].shape)}"
    return None


def _begin(found: Outcome, plain: Outcome) -> str | None:
    # Without this, two runs that have nothing in common are far apart, and all that lies between counts as rounding.
    for name, value in plain.begin.items():
        if found.begin.get(name) != value:
            return f"parameter '{name}' before the first step; does the script seed its random numbers?"
    return None


def _first_parameter(found: Outcome, measure: Yardstick, steps: int) -> str | None:
    errors = {name: _distance(value, measure.off.params[name]) for name, value in measure.centre.params.items()}
    moved = sorted(errors.values())
    median = moved[len(moved) // 2] if moved else 0.0
    for name, centre in measure.centre.params.items():
        size = float(centre.abs().max()) if centre.numel() else 0.0
        allowed = 2 * max(errors[name], median, (steps + 1) * _MASTER_EPS * size)
        if not _distance(found.params[name], centre) <= allowed:  # a NaN compares false
            return f"first parameter '{name}'"
    return None


def _first_number(found: Outcome, measure: Yardstick) -> str | None:
    pairs = {
        "the loss": (_flat(found.losses), _flat(measure.centre.losses), _flat(measure.off.losses)),
        "the gradient norm": (found.norms, measure.centre.norms, measure.off.norms),
    }
    for what, (mine, centre, off) in pairs.items():
        error, other = _difference(mine, centre), _difference(off, centre)
        floor = 4 * _EPS[found.dtype] * max((abs(value) for value in centre), default=0.0)
        if error is not None and other is not None and not error.absolute <= 2 * max(other.absolute, floor):
            return f"{what}, while the parameters agree"
    return None


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _largest(found: Outcome, plain: Outcome) -> Difference | None:
    if _shape(found, plain) is not None:
        return None
    absolute = relative = 0.0
    for name, value in plain.params.items():
        distance = _distance(found.params[name], value)
        size = float(value.abs().max()) if value.numel() else 0.0
        # Not max(): a NaN must win.
        absolute = absolute if distance <= absolute else distance
        ratio = distance / size if size else distance
        relative = relative if ratio <= relative else ratio
    return Difference(absolute, relative)


def _difference(mine: Sequence[float], other: Sequence[float]) -> Difference | None:
    if len(mine) != len(other) or not mine:
        return None
    absolute = 0.0
    for one, two in zip(mine, other, strict=True):
        absolute = absolute if abs(one - two) <= absolute else abs(one - two)
    size = max(abs(value) for value in other)
    return Difference(absolute, absolute / size if size else absolute)


def _flat(losses: Sequence[Sequence[float]]) -> list[float]:
    return [loss for of_rank in losses for loss in of_rank]


def _shown(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    return "0" if difference.absolute == 0 else f"{difference.absolute:.1e} ({difference.relative:.0e})"
