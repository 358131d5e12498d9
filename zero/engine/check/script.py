"""`zero check`: runs a script once per variant through our launcher, and compares what the runs recorded."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from zero.core.released import UNCLIPPED
from zero.engine.check.assigned import environment
from zero.engine.check.compare import Failed, compare_runs
from zero.engine.check.recording import Outcome, load
from zero.engine.check.runs import Run
from zero.launch.args.check import CheckRequest

_TAIL = 15  # lines of a run's output that are shown when it failed
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_GRACE = 20  # seconds for the launcher to end its ranks


def run(request: CheckRequest) -> int:
    """Do what `zero check` was asked to and print the table; the exit status is 0 when all is well."""
    if request.stray_options:
        say(f"{', '.join(request.stray_options)} behind the script: given to it; options of zero check go before it")
    for line in _clips(Path(request.script)):
        say(f"{request.script}:{line}: {UNCLIPPED}")
    with tempfile.TemporaryDirectory(prefix="zero-check-") as folder:
        train = functools.partial(_outcome, request, Path(folder))
        try:
            report = compare_runs(request.steps, request.stages, request.accumulations, request.offload, train)
        except Failed:
            say("there is nothing to compare with, since plain torch does not run the script")
            return 1
    print(report, flush=True)
    return 0 if report.ok else 1


def say(text: str) -> None:
    """One line of the check's own, on stderr."""
    print(f"zero check: {text}", file=sys.stderr, flush=True)


def _clips(script: Path) -> list[int]:
    """The lines of a script that call a function of torch.nn.utils which clips gradients."""
    try:
        calls = [node.func for node in ast.walk(ast.parse(script.read_bytes())) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):
        return []  # its run says what is wrong with it
    # Methods of the same name, as of Accelerate, are not meant.
    names = [(ast.unparse(func).rpartition("utils."), func.lineno) for func in calls]
    return sorted(line for (owner, _, name), line in names if name in _CLIPPING and owner in ("", "torch.nn.", "nn."))


def _outcome(request: CheckRequest, folder: Path, one: Run, lead: Outcome | None) -> Outcome:
    """Run the script as `one` says; what went wrong is said at once, and raised as `Failed`."""
    folder, begin = folder / one.kind.value, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)  # of the last such run, which nothing follows any more
    folder.mkdir()
    assignment = environment(one, folder, lead.folder if lead is not None else None)
    status, output = launch(request.command(), assignment, request.timeout)
    outcome = load(folder) if status == 0 else None
    seconds = time.monotonic() - begin
    if outcome is not None:
        say(f"{one.name}: {seconds:.1f} s")
        return outcome
    why, tail = (
        why_not(folder, one.steps, status, f"{request.timeout:g} s (--timeout)"),
        "\n".join(output.splitlines()[-_TAIL:]),
    )
    say(f"{one.name}: {why}" + (f"; the end of its output:\n{tail}" if tail else ", and it printed nothing"))
    raise Failed(why)


def launch(words: Sequence[str], assignment: Mapping[str, str], timeout: float) -> tuple[int | None, str]:
    """Run `zero` with these words and variables: the exit status, None when the time was over, and all it printed."""
    command = [sys.executable, "-m", "zero", *words]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # A session of its own, so that Ctrl-C comes here first and the launcher is asked to end once.
        process = subprocess.Popen(
            command,
            env={**os.environ, **assignment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(timeout)
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


def why_not(folder: Path, wanted: int, status: int | None, limit: str) -> str:
    """Why a run has nothing to show, of which so many steps were wanted; `limit`: seconds, and where they come from."""
    if status is None:
        return f"not done after {limit}"
    if status != 0:
        return f"exit status {status}"
    steps = folder / "steps.txt"
    if not steps.exists():
        return "the script ended without a call of zero.initialize"
    return f"the script ended after {steps.read_text()} of {wanted} optimizer steps; --steps says how many are wanted"
