"""`zero check`: runs a script once per variant through our launcher, and compares what the runs left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from zero.engine.check.compare import Report, Row, failed, follows, judge, same_bits, yardstick
from zero.engine.check.order import environment
from zero.engine.check.recording import Outcome, load
from zero.engine.check.runs import Kind, Run, check_counts, engine_runs
from zero.engine.check.table import show
from zero.launch.args.check import CheckRequest

_TAIL = 15  # lines of a run's output that are shown when it failed
_GRACE = 20  # seconds for the launcher to end its ranks


class Failure(NamedTuple):
    """Why a run left no outcome, in one line, and the end of what it printed."""

    why: str
    tail: str


def run(request: CheckRequest) -> int:
    """Do what `zero check` was asked to and print the table; the exit status is 0 when all is well."""
    check_counts(request.steps, request.stages, request.accumulations)
    rows: list[Row] = []
    notes: list[str] = []
    if request.stray_options:
        say(f"{', '.join(request.stray_options)} behind the script: given to it; options of zero check go before it")
    for accumulation in request.accumulations:
        found = _of_accumulation(request, accumulation, notes)
        if found is None:
            return 1
        rows += found
    report = Report(tuple(rows), tuple(dict.fromkeys(notes)))
    show(report)
    return 0 if report.ok else 1


def _of_accumulation(request: CheckRequest, accumulation: int, notes: list[str]) -> list[Row] | None:
    """The rows of one accumulation count; None when there is nothing to compare with."""
    plain = _outcome(request, Run(Kind.PLAIN, accumulation, request.steps))
    if isinstance(plain, Failure):
        say("there is nothing to compare with, since plain torch does not run the script")
        return None
    exact = _outcome(request, Run(Kind.EXACT, accumulation, request.steps))
    nudged = None
    if isinstance(exact, Failure) or not follows(plain, exact):
        nudged = _outcome(request, Run(Kind.NUDGED, accumulation, request.steps))
        why = "fp64 does not run here" if isinstance(exact, Failure) else "the run in fp64 begins with other losses"
        notes.append(f"Rounding is measured by a plain run whose weights are off by one rounding, as {why}.")
    if isinstance(nudged, Failure):
        say("there is nothing to measure rounding by")
        return None
    measure = yardstick(plain, None if isinstance(exact, Failure) else exact, nudged)
    rows, outcomes = [], []
    for one in engine_runs(request.stages, accumulation, request.steps, request.offload):
        found = _outcome(request, one)
        if isinstance(found, Failure):
            rows.append(failed(one, found.why))
        else:
            outcomes.append(found)
            rows.append(judge(one, found, plain, measure))
    if len(outcomes) > 1 and same_bits(outcomes):
        notes.append(f"The stages that ran agree among themselves in every bit (accumulation {accumulation}).")
    return rows


def say(text: str) -> None:
    """One line of the check's own, on stderr."""
    print(f"zero check: {text}", file=sys.stderr, flush=True)


def _outcome(request: CheckRequest, one: Run) -> Outcome | Failure:
    """Run the script as `one` says; what went wrong is said at once."""
    with tempfile.TemporaryDirectory(prefix="zero-check-") as name:
        folder, begin = Path(name), time.monotonic()
        status, output = _launch(request, one, folder)
        found = load(folder)
        seconds = time.monotonic() - begin
        if status == 0 and found is not None:
            say(f"{one.name}: {seconds:.1f} s")
            return found
        failure = Failure(_why(request, one, folder, status), "\n".join(output.splitlines()[-_TAIL:]))
    say(
        f"{one.name}: {failure.why}"
        + (f"; the end of its output:\n{failure.tail}" if failure.tail else ", and it printed nothing")
    )
    return failure


def _launch(request: CheckRequest, one: Run, folder: Path) -> tuple[int | None, str]:
    """The exit status, None when the time was over, and everything printed."""
    command = [sys.executable, "-m", "zero", *request.command()]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # A session of its own, so that Ctrl-C comes here first and the launcher is asked to end once.
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment(one, folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(request.timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
        output.seek(0)
        return status, output.read()


def _end(process: subprocess.Popen) -> None:
    """End a launcher that still runs; it ends its ranks."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _why(request: CheckRequest, one: Run, folder: Path, status: int | None) -> str:
    if status is None:
        return f"not done after {request.timeout:g} s (--timeout)"
    if status != 0:
        return f"exit status {status}"
    steps = folder / "steps.txt"
    if not steps.exists():
        return "the script ended without a call of zero.initialize"
    return (
        f"the script ended after {steps.read_text()} of {one.steps} optimizer steps; --steps says how many are wanted"
    )
