"""`zero tune`: the script's own run, which brings the plan, then runs of the best few of it, and a table."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero.config.override import apply
from zero.launch.args.scripts import TuneRequest
from zero.log import logger
from zero.tools.script_runs import ScriptRuns, why_not
from zero.tools.tune.trial import OUT_OF_MEMORY, WARMUP, Trial

_FIRST = 3  # groups (stage, placement, mesh) of which one row is tried before several of one group
_OUT_OF_MEMORY = re.compile(rf"{OUT_OF_MEMORY}|not enough memory|allocate memory|MemoryError|bad_alloc", re.IGNORECASE)
_ALIKE = 0.05  # of the planned time
_MB = 1e6


class Untunable(ValueError):
    """There is nothing to tune; the message says why."""


@dataclass(frozen=True)
class Tried:
    """A row of the plan and its runs, see `TriedRun`; of the script's own the row may have a name alone.

    seconds: of each measured step of each run, empty where none came so far; then `why` says the reason.
    """

    row: Mapping[str, Any]
    seconds: Sequence[Sequence[float]] = ()
    memory: int = 0
    why: str = ""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.row["name"]

    @property
    def median(self) -> float:
        """Seconds of a step in the fastest run: what disturbs one makes it slower."""
        return min(map(statistics.median, self.seconds), default=math.inf)

    @property
    def span(self) -> tuple[float, float]:
        """From the fastest to the slowest run the seconds of a step: the median, less and more its spread.

        The spread of a run is half of the middle half of its steps.
        """
        ends = []
        for run in self.seconds:
            low, _, high = statistics.quantiles(run, n=4) if len(run) > 1 else (0.0, 0.0, 0.0)
            ends += [statistics.median(run) - (high - low) / 2, statistics.median(run) + (high - low) / 2]
        return (min(ends), max(ends)) if ends else (math.inf, math.inf)


@dataclass(frozen=True)
class Tuned:
    """All runs, the script's own first; what the plan said of the rest, and the configuration of the fastest."""

    runs: Sequence[Tried]
    rows: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    seconds: float

    @property
    def fastest(self) -> Tried:
        """That of the fastest run."""
        return min(self.runs, key=lambda run: run.median)

    @property
    def best(self) -> Tried:
        """The fastest, where each of its runs is faster than each of the script's own, by more than their spread."""
        own, fastest = self.runs[0], self.fastest
        return fastest if fastest.span[1] < own.span[0] or not own.seconds else own

    def __str__(self) -> str:
        width = max(len(run.name) for run in self.runs) + 2
        heads = ("ms planned", "ms", "+- %", "MB planned", "MB")
        lines = [" " * width + "".join(f"{head:>12}" for head in heads)]
        for run in self.runs:
            cells = [""] * len(heads)
            if "sent" in run.row:
                cells[0], cells[3] = _ms(run.row["seconds"]), f"{run.row['bytes'] / _MB:,.0f}"
            if run.seconds:
                low, high = run.span
                cells[1], cells[2] = _ms(run.median), f"{50 * (high - low) / run.median:.0f}"
                cells[4] = f"{run.memory / _MB:,.0f}"
            mark = "* " if run is self.best else "  "
            lines.append(f"{mark + run.name:<{width}}" + "".join(f"{cell:>12}" for cell in cells) + f"  {run.why}")
        fit = sum(not row["lacks"] for row in self.rows)
        count = sum(max(1, len(run.seconds)) for run in self.runs)
        lines += ["", f"{count} runs in {self.seconds:.0f} s; {fit} of {len(self.rows)} planned ones fit."]
        return "\n".join([*lines, *self._reasons()]).rstrip()

    def _reasons(self) -> Iterator[str]:
        """Why the best is."""
        own, best, fastest = self.runs[0], self.best, self.fastest
        if fastest is own:
            yield "The script's own configuration is the fastest of them."
        elif best is own:
            yield f"The script's own stays: to {fastest.name} there is no difference that the runs can tell."
        elif own.seconds:
            yield f"{best.name} takes {best.median / own.median:.0%} of the time of the script's own, {own.name}."
        else:
            yield f"The script's own, {own.name}, gave no time: {own.why}."
        if "sent" in own.row and best is not own:
            sent, before = (run.row["sent"] / _MB for run in (best, own))
            each, earlier = (run.row["micro_batch"] for run in (best, own))
            more = f"and computes {each} samples at once (own: {earlier})"
            yield f"It sends {sent:,.1f} MB in a step (own: {before:,.1f}), {more}."
        near = [run.name for run in self.runs if run not in (best, fastest) and run.span[0] <= best.span[1]]
        if near:
            yield f"Within the spread of its steps: {'; '.join(near)}."


def run(request: TuneRequest) -> int:
    """Do what `zero tune` was asked to, print the table and write the file: then the exit status is 0."""
    try:
        found = tune(request)
    except Untunable as error:
        logger.error("zero tune: %s", error)
        return 1
    print(found)
    Path(request.json).write_text(json.dumps(found.config, indent=2) + "\n", encoding="utf-8")
    print(f"{request.json} has the configuration.", flush=True)
    return 0


def tune(request: TuneRequest) -> Tuned:
    """Run the script as it is, then as the plan of that run says. Raises `Untunable`.

    At the end the script's own configuration and the fastest run once more: the first runs of all may be slower.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zero-tune-") as name, ScriptRuns(request, Path(name)) as ranks:
        folders = (Path(name, str(number)) for number in itertools.count())
        ranks.met()
        before = time.monotonic()
        own, rows, config = _own_run(request, ranks, next(folders))
        runs = [own]
        longest = time.monotonic() - before

        def timed(row: Mapping[str, Any], more: int) -> Tried | None:
            """A run; None where with `more` behind it the time would not do."""
            nonlocal longest
            before = time.monotonic()
            if before + (1 + more) * longest > begin + request.limit:
                return None
            found = try_row(request, ranks, row, next(folders), begin + request.limit - before)
            longest = max(longest, time.monotonic() - before)
            return found

        closing = 2 if own.seconds else 0
        while len(runs) <= request.runs and (row := next_row(rows, runs)) is not None:
            if (found := timed(row, closing)) is None:
                break
            runs.append(found)
        at = min(range(len(runs)), key=lambda number: runs[number].median)
        turns = [(0, {**own.row, "sets": {}}, 1), (at, runs[at].row, 0)] if at and own.seconds else []
        for number, row, more in turns:
            if (found := timed(row, more)) is not None:
                was, memory = runs[number], max(runs[number].memory, found.memory)
                runs[number] = replace(was, seconds=[*was.seconds, *found.seconds], memory=memory)
    if not any(run.seconds for run in runs):
        raise Untunable(f"no run came to its {WARMUP + request.steps} steps; the script's own was {runs[0].why}")
    tuned = Tuned(runs, rows, config, time.monotonic() - begin)
    return replace(tuned, config=apply(config, tuned.best.row.get("sets", {}) if tuned.best is not runs[0] else {}))


def _own_run(
    request: TuneRequest, ranks: ScriptRuns, folder: Path
) -> tuple[Tried, list[Mapping[str, Any]], dict[str, Any]]:
    """Run the script as it is: that run, the rows of its plan in the order to try them, and its configuration.

    The plan is what the run wrote before its first forward. Only too little memory is a reason to go on without times.
    """
    own = try_row(request, ranks, {"name": "the script's own"}, folder, request.limit, request.space)
    path = folder / "plan.json"
    plan = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "error" in plan:
        raise Untunable(f"the model cannot be planned: {plan['error']}")
    if not plan or own.why not in ("", OUT_OF_MEMORY):
        raise Untunable(own.why)
    rows = ordered(plan["rows"])
    found = next((row for row in rows if row["name"] == plan["own"]), {"name": plan["own"]})
    return replace(own, row=found), rows, plan["config"]


def try_row(
    request: TuneRequest,
    ranks: ScriptRuns,
    row: Mapping[str, Any],
    folder: Path,
    left: float,
    space: Sequence[str] | None = None,
) -> Tried:
    """Run the script under a row of the plan, for `left` seconds at most; `space`: of what it is to make a plan."""
    trial = Trial(row.get("sets", {}), request.steps, request.memory and request.memory * 1e9, space)
    folder.mkdir()
    status, output = ranks.run(trial.environment(folder), folder, left)
    found = Tried(row)
    wrote = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank-*.json"))]
    if status == 0 and wrote:
        samples, wanted = wrote[0]["samples"], row.get("micro_batch", wrote[0]["samples"])
        why = f"the script gives {samples} samples at once, and not {wanted}: its loader does not ask the configuration"
        if samples == wanted:
            found, why = replace(found, seconds=[wrote[0]["seconds"]], memory=max(of["memory"] for of in wrote)), ""
    elif _OUT_OF_MEMORY.search(output):
        why = OUT_OF_MEMORY
    else:
        why = why_not(folder, WARMUP + trial.steps, status, f"{left:.0f} s (--limit)")
        if status:
            said = [line for line in output.splitlines() if line.strip() and not line.startswith("zero run: ")]
            why += f": {said[-1][:200] if said else 'it printed nothing'}"
    logger.info("%s: %s", found.name, why or f"{1e3 * found.median:.1f} ms")
    return replace(found, why=why)


def ordered(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By the plan's time. What it holds for alike goes by the calls that it takes, which the plan does not count."""
    fastest = min((row["seconds"] for row in rows if not row["lacks"]), default=1.0)

    def key(row: Mapping[str, Any]) -> tuple[float, ...]:
        return int(math.log(row["seconds"] / fastest) / math.log1p(_ALIKE)), -row["micro_batch"], row["bytes"]

    return sorted(rows, key=key)


def next_row(rows: Sequence[Mapping[str, Any]], runs: Sequence[Tried]) -> Mapping[str, Any] | None:
    """What to try next: the best of each of the best groups, then others of the group that is the fastest.

    Rows are those of the plan in its order. What takes no less than a run that was out of memory, at no smaller a
    micro-batch, is left out: of what a script takes besides, which grows with the micro-batch, the plan knows nothing.
    """
    names, failed = {run.name for run in runs}, [run.row for run in runs if run.why == OUT_OF_MEMORY]

    def fits(row: Mapping[str, Any]) -> bool:
        nbytes, size = row["bytes"], row["micro_batch"]
        less = (nbytes < of.get("bytes", math.inf) or size < of.get("micro_batch", 0) for of in failed)
        return not row["lacks"] and all(less)

    left = [row for row in rows if row["name"] not in names and fits(row)]
    tried = {run.row.get("group") for run in runs[1:]}
    fastest = min(runs, key=lambda run: run.median).row.get("group")
    new = [row for row in left if row["group"] not in tried] if len(tried) < _FIRST else []
    return next(iter([*new, *(row for row in left if row["group"] == fastest), *left]), None)


def _ms(seconds: float) -> str:
    """In milliseconds; of what takes less than ten, three digits."""
    return f"{1e3 * seconds:,.1f}" if seconds >= 0.01 else f"{1e3 * seconds:.3g}"
