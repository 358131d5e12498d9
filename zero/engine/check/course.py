"""The runs of one accumulation count in their order, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zero.engine.check.compare import Row, failed, judge, yardstick
from zero.engine.check.recording import Outcome
from zero.engine.check.runs import Kind, Run

Train = Callable[[Run, Outcome | None], Outcome]


class Failed(RuntimeError):
    """A run came to nothing, for the reason that is the message."""


def rows_of(runs: Iterable[Run], accumulation: int, steps: int, train: Train, notes: list[str]) -> list[Row]:
    """Judge each of `runs`, all of the engine; raises `Failed` when plain torch does not run.

    train: does a run, beside the other run that it is given where it is to follow one. Runs with the same bits are
    compared with one run of plain torch; it is PLAIN where they go as that did.
    """
    plain = train(Run(Kind.PLAIN, accumulation, steps), None)
    measure = yardstick(plain, train(Run(Kind.NUDGED, accumulation, steps), plain))
    besides = [(plain.bits, plain)]
    rows, bits = [], []
    for run in runs:
        try:
            found = train(run, None)
            bits.append(found.bits)
            beside = next((other for known, other in besides if known == bits[-1]), None)
            if beside is None:
                beside = train(Run(Kind.BESIDE, accumulation, steps, run.stage, run.places), found)
                besides.append((bits[-1], beside))
        except Failed as error:
            rows.append(failed(run, str(error)))
        else:
            rows.append(judge(run, found, beside, measure))
    if len(bits) > 1 and bits.count(bits[0]) == len(bits):
        notes.append(f"The stages that ran agree among themselves in every bit (accumulation {accumulation}).")
    return rows
