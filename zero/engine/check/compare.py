"""Comparing runs: how far each is from plain torch, and whether rounding explains it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zero.engine.check.recording import RunRecord, Values
from zero.engine.check.runs import CheckRun, RunKind, check_counts, engine_runs

_EPS = {"fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
Train = Callable[[CheckRun, RunRecord | None], RunRecord]

_AMPLE = 8  # times what a nudge of one rounding does, or one unit in the last place, passes as rounding


class Difference(NamedTuple):
    """The largest absolute difference, and that over the largest absolute value."""

    absolute: float
    relative: float


class ComparedRun(NamedTuple):
    """One line of the table; the differences are those from plain torch that arise in one step."""

    run: CheckRun
    loss: Difference | None
    grads: Difference | None
    params: Difference | None
    verdict: str
    good: bool


@dataclass(frozen=True)
class Report:
    """The result of a check: true if all is well, and a table when printed."""

    rows: tuple[ComparedRun, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every run agrees with plain torch, and there was one."""
        return bool(self.rows) and all(row.good for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [("run", "loss", "gradients", "parameters", "verdict")]
        lines += [(row.run.name, *map(_text, (row.loss, row.grads, row.params)), row.verdict) for row in self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        texts = ["  ".join([*map(str.ljust, line[:4], widths), line[4]]) for line in lines]
        texts.insert(1, "-" * max(map(len, texts)))
        head = "Largest differences from plain torch in one step, absolute (relative):"
        return "\n".join([head, *texts, *self.notes, "All is well." if self.ok else "NOT all is well."])


class Yardstick(NamedTuple):
    """What rounding alone does to the loss and to the gradient of each parameter.

    share: to the gradient of the parameter in the median, as a share of its largest element: a floor for those that a
           nudge did not move by chance.
    """

    loss: float
    grads: dict[str, float]
    share: float


def yardstick(plain: RunRecord, nudged: RunRecord) -> Yardstick | None:
    """By how much a nudge of the weights moves loss and gradients.

    None when the nudged run does not begin as the plain one did: then nothing can be said about anything.
    """
    firsts = [(mine[0], theirs[0]) for mine, theirs in zip(plain.losses, nudged.losses, strict=True) if mine and theirs]
    near = math.sqrt(_EPS[plain.dtype])
    if not all(abs(mine - theirs) <= near * max(1e-6, abs(theirs)) for mine, theirs in firsts):
        return None
    loss = _of_losses(nudged, plain)
    grads, shares = {}, [0.0]
    for name in plain.steps[0].grads:
        pairs = [(one.grads[name], other.grads[name]) for one, other in zip(plain.steps, nudged.steps, strict=True)]
        grads[name] = max(_distance(*pair) for pair in pairs)
        size = max(_size(grad) for grad, _ in pairs)
        shares += [grads[name] / size] if size else []
    return Yardstick(loss.absolute if loss is not None else 0.0, grads, statistics.median(shares))


class Failed(RuntimeError):
    """A run that could not be carried out, for the reason that is the message."""


def compare_runs(
    steps: int, stages: Sequence[int], accumulations: Sequence[int], offload: bool, train: Train
) -> Report:
    """Carry out and judge every run of a check; raises `Failed` when plain torch does not run.

    train: carries a run out, and follows the other run if there is one. Raises ValueError, by argument, for what cannot
    be run.
    """
    check_counts(steps, stages, accumulations)
    rows: list[ComparedRun] = []
    notes: list[str] = []
    for accumulation in accumulations:
        plain = train(CheckRun(RunKind.PLAIN, accumulation, steps), None)
        if plain.rules and not notes:
            notes.append(f"{plain.rules}.")
        measure = yardstick(plain, train(CheckRun(RunKind.NUDGED, accumulation, steps), plain))
        # Runs with the same bits are compared with one run of plain torch; that is PLAIN where they go as it did.
        references, bits = [(plain.bits, plain)], []
        for run in engine_runs(stages, accumulation, steps, offload):
            try:
                outcome = train(run, None)
                bits.append(outcome.bits)
                reference = next((other for known, other in references if known == bits[-1]), None)
                if reference is None:
                    reference = train(CheckRun(RunKind.BESIDE, accumulation, steps, run.stage, run.places), outcome)
                    references.append((bits[-1], reference))
            except Failed as error:
                rows.append(ComparedRun(run, None, None, None, f"FAILED: {error}", False))
            else:
                rows.append(judge(run, outcome, reference, measure))
        if len(bits) > 1 and bits.count(bits[0]) == len(bits):
            notes.append(f"The stages that ran agree among themselves in every bit (accumulation {accumulation}).")
    return Report(tuple(rows), tuple(notes))


def judge(run: CheckRun, outcome: RunRecord, reference: RunRecord, measure: Yardstick | None) -> ComparedRun:
    """The row of one run of the engine; `reference`: the run of plain torch that took each step from its weights.

    "within rounding" means: loss and gradients are at most eight times as far off as a nudge of each weight by one unit
    in its last place moves them, or eight such units; and so is what the step made of the gradient, where it does not
    carry rounding any further.
    """
    wrong = _shape(outcome, reference)
    unlike = next((name for name, value in reference.begin.items() if outcome.begin.get(name) != value), None)
    if wrong is None and unlike is not None:  # said before all else, since everything differs then
        wrong = f"parameter '{unlike}' before the first step; does the script seed its random numbers?"
    if wrong is None and measure is None:
        wrong = "plain torch does not repeat itself: the loss depends on more than weights, batch and seed"
    if wrong is None and outcome.stray is not None:
        wrong = f"parameter {outcome.stray} is not what it is on rank 0"
    if wrong is None:
        wrong = _first_tensor(outcome, reference, measure) or _first_number(outcome, reference, measure)
    loss = _of_losses(outcome, reference)
    alike = _shape(outcome, reference) is None
    grads, params = (_largest(outcome, reference, kind) if alike else None for kind in ("grads", "params"))
    if wrong is not None:
        return ComparedRun(run, loss, grads, params, f"DIFFERS: {wrong}", False)
    # The norm is a report, and its squares are added up in another order.
    same = outcome.bits == reference.bits
    return ComparedRun(run, loss, grads, params, "same bits" if same else "within rounding", True)


def _shape(outcome: RunRecord, reference: RunRecord) -> str | None:
    counts = [([len(losses) for losses in one.losses], len(one.norms), len(one.steps)) for one in (outcome, reference)]
    if counts[0] != counts[1]:
        return f"{counts[0][0]} losses on the ranks, where plain torch has {counts[1][0]}"
    for mine, theirs in zip(outcome.steps, reference.steps, strict=True):
        params, others = ({name: value.shape for name, value in step.params.items()} for step in (mine, theirs))
        if params != others or mine.grads.keys() != theirs.grads.keys():
            return "the parameters have other names or shapes"
    return None


def _first_tensor(outcome: RunRecord, reference: RunRecord, measure: Yardstick) -> str | None:
    before: Values = {}
    for number, (mine, theirs) in enumerate(zip(outcome.steps, reference.steps, strict=True), 1):
        for name, grad in theirs.grads.items():
            floor = max(measure.share, _EPS[outcome.dtype]) * _size(grad)
            if not _distance(mine.grads[name], grad) <= _AMPLE * max(measure.grads[name], floor):  # a NaN is false
                return f"first in the gradient of '{name}' at step {number}"
        for name, value in theirs.params.items():
            moved = _distance(value, before[name]) if name in before else 0.0
            floor = _AMPLE * _EPS["fp32"] * max(_size(value), moved)
            allowed = theirs.slack.get(name, 0.0) + floor  # the slack is of single elements
            if not bool(((mine.params[name].double() - value.double()).abs() <= allowed).all()):
                return f"first in the update of '{name}' at step {number}, of a right gradient"
        before = mine.params
    return None


def _first_number(outcome: RunRecord, reference: RunRecord, measure: Yardstick) -> str | None:
    for what, mine, theirs, eps, noise in (
        ("gradient norm", outcome.norms, reference.norms, _EPS["fp32"], 0.0),
        ("loss", _flat(outcome.losses), _flat(reference.losses), _EPS[outcome.dtype], measure.loss),
    ):
        for one, other in zip(mine, theirs, strict=True):
            if one != other and not abs(one - other) <= _AMPLE * max(noise, eps * abs(other)):
                return f"the {what} is {one:.9g}, where that of plain torch is {other:.9g}; the parameters agree"
    return None


def _size(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    same = one.numel() == 0 or torch.equal(one, other)  # infinite gradients may be
    return 0.0 if same else _size(one.double() - other.double())


def _largest(outcome: RunRecord, reference: RunRecord, kind: str) -> Difference:
    differences = [
        _difference(getattr(mine, kind)[name], value)
        for mine, theirs in zip(outcome.steps, reference.steps, strict=True)
        for name, value in getattr(theirs, kind).items()
    ]
    # Not max() of Python's: a NaN must win.
    return Difference(*torch.tensor([(0.0, 0.0), *differences], dtype=torch.float64).amax(0).tolist())


def _difference(mine: torch.Tensor, other: torch.Tensor) -> Difference:
    absolute, size = _distance(mine, other), _size(other)
    return Difference(absolute, absolute / size if size else absolute)


def _of_losses(outcome: RunRecord, reference: RunRecord) -> Difference | None:
    mine, other = (torch.tensor(_flat(one.losses), dtype=torch.float64) for one in (outcome, reference))
    return _difference(mine, other) if mine.numel() == other.numel() > 0 else None


def _flat(losses: Sequence[Sequence[float]]) -> list[float]:
    return [loss for of_rank in losses for loss in of_rank]


def _text(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    return "0" if difference.absolute == 0 else f"{difference.absolute:.1e} ({difference.relative:.0e})"
