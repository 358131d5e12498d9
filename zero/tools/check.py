"""`zero check`: runs a script once per variant, and compares what the runs recorded."""

from __future__ import annotations

import ast
import functools
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from zero.core.released import UNCLIPPED
from zero.engine.check.checked_run import environment
from zero.engine.check.compare import Failed, compare_runs
from zero.engine.check.recording import RunRecord, load
from zero.engine.check.runs import CheckRun, check_counts, engine_runs
from zero.launch.args.scripts import CheckRequest
from zero.tools.script_runs import ScriptRuns, why_not

_TAIL = 15  # lines of a run's output that are shown when it failed
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


def run(request: CheckRequest) -> int:
    """Do what `zero check` was asked to and print the table; the exit status is 0 when all is well."""
    if request.stray_options:
        say(f"{', '.join(request.stray_options)} behind the script: given to it; options of zero check go before it")
    for line in _clips(Path(request.script)):
        say(f"{request.script}:{line}: {UNCLIPPED}")
    check_counts(request.steps, request.stages, request.accumulations)
    stages = len(list(engine_runs(request.stages, 1, request.steps, request.offload)))
    # For each accumulation plain torch alone, nudged, and beside one of the stages, which mostly are alike.
    total = len(request.accumulations) * (stages + 3)
    with tempfile.TemporaryDirectory(prefix="zero-check-") as folder, ScriptRuns(request, Path(folder)) as ranks:
        say(f"some {total} runs of {request.script}, once the ranks have imported torch and zero")
        ranks.met()
        with tqdm(total=total, desc="zero check", unit="run", leave=False, disable=None) as bar:
            train = functools.partial(_train, request, ranks, Path(folder), bar)
            try:
                report = compare_runs(request.steps, request.stages, request.accumulations, request.offload, train)
            except Failed:
                say("there is nothing to compare with, since plain torch does not run the script")
                return 1
    print(report, flush=True)
    return 0 if report.ok else 1


def say(text: str) -> None:
    """One line of the check's own, on stderr."""
    tqdm.write(f"zero check: {text}", file=sys.stderr)  # above a bar


def _clips(script: Path) -> list[int]:
    """The lines of a script that call a function of torch.nn.utils which clips gradients."""
    try:
        calls = [node.func for node in ast.walk(ast.parse(script.read_bytes())) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):
        return []  # its run says what is wrong with it
    # Methods of the same name, as of Accelerate, are not meant.
    names = [(ast.unparse(func).rpartition("utils."), func.lineno) for func in calls]
    return sorted(line for (owner, _, name), line in names if name in _CLIPPING and owner in ("", "torch.nn.", "nn."))


def _train(
    request: CheckRequest, ranks: ScriptRuns, runs: Path, bar: tqdm, one: CheckRun, lead: RunRecord | None
) -> RunRecord:
    """Run the script as `one` says; what went wrong is said at once, and raised as `Failed`."""
    folder, begin = runs / one.kind.name, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)  # of the last such run, which nothing follows any more
    folder.mkdir()
    variables = environment(one, folder, lead.folder if lead is not None else None)
    status, output = ranks.run(variables, folder, request.timeout)
    outcome = load(folder) if status == 0 else None
    seconds = time.monotonic() - begin
    bar.update()
    if outcome is not None:
        say(f"{one.name}: {seconds:.1f} s")
        return outcome
    why = why_not(folder, one.steps, status, f"{request.timeout:g} s (--timeout)")
    tail = "\n".join(output.splitlines()[-_TAIL:])
    say(f"{one.name}: {why}" + (f"; the end of its output:\n{tail}" if tail else ", and it printed nothing"))
    raise Failed(why)
