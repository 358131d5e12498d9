"""Runs programs that others wrote, unchanged, behind `zero run --as-deepspeed`: `make programs PROGRAMS=FOLDER`.

FOLDER has their source trees, or some of them; they are no part of this repository. TRL's scripts are those of the
installed library. Each program runs on two CPU ranks, at each of its stages once through and once more from a
checkpoint in the middle. The exit status is 1 if a cell of the table is "no"; lines below the table say why. "-" stands
where there is nothing to ask: a program that saves nothing, begins from no checkpoint, or has one stage.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parents[1]), str(_HERE.parent)]
from huggingface_cases import settings  # noqa: E402
from programs import PROGRAMS, Log, Program, Weights  # noqa: E402

from zero.checkpoint.model_files import consolidate  # noqa: E402

PATIENCE = 300  # seconds for one run
ACCELERATE = {  # what `accelerate launch --use_deepspeed` says to its script
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{config}",
    "ACCELERATE_MIXED_PRECISION": "no",
}
COLUMNS = ("trained", "saved", "same bits", "resumed", "loaded")


@dataclass(frozen=True)
class Outcome:
    """What a run has left."""

    status: int | str
    log: Log = field(default_factory=list)
    saved: tuple[int, ...] = ()  # the steps of its checkpoints
    weights: Weights = field(default_factory=dict)  # of the last one
    computed: Weights = field(default_factory=dict)  # the same as the model computes with them


def copied(program: Program, first: Path, out: Path) -> Path:
    """The folder of checkpoints of the run that went on, copied as it was after the first save, without its log."""
    early, late = (Path(program.checkpoint.format(step=step)) for step in program.steps)
    (source,) = first.glob(str(early.parent))
    shutil.copytree(source, out / source.name, ignore=shutil.ignore_patterns(late.name, "events.out.*"))
    (out / source.name / "latest").write_text(early.name)
    return out / source.name


def run(program: Program, script: Path, out: Path, log: Path, **places: Any) -> Outcome:
    """Run a program once, on two ranks; what it prints goes to the file `log`."""
    packages = [str(script.parents[program.packages])] if program.packages else []
    stand_ins = _HERE / "stand_ins"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            map(str, (_HERE.parents[1], _HERE.parent, stand_ins, stand_ins / script.stem, *packages))
        ),
        "HF_HOME": str(out.parent / "data" / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # else each run compiles all its libraries anew
        **({name: value.format(**places) for name, value in ACCELERATE.items()} if program.accelerate else {}),
    }
    given = [*program.words, *(program.resume if "first" in places else [])]
    out.mkdir(parents=True)
    if program.in_place and "first" in places:
        places["again"] = copied(program, places["first"], out)
    line = ["-m", "zero", "run", "--as-deepspeed", "--num_gpus", "2", *["--no_local_rank"] * program.accelerate]
    line += [str(script), *(word.format(out=out, **places) for word in given)]
    with open(log, "w") as printed:
        process = subprocess.Popen(
            [sys.executable, *line],
            cwd=out,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"ended after {PATIENCE} s"
    return Outcome(f"exit status {status}, see {log}" if status else 0, *(() if status else left(program, out)))


def left(program: Program, out: Path) -> tuple[Log, tuple[int, ...], Weights, Weights]:
    """What a run that ended well has left in its folder: entries of its log, steps and weights of its checkpoints."""
    if program.checkpoint is None:
        return program.log(out), (), {}, {}
    found = {step: list(out.glob(program.checkpoint.format(step=step))) for step in program.steps}
    saved = {step: folders[0] for step, folders in found.items() if folders}
    if not saved:
        return program.log(out), (), {}, {}
    dtypes = {"exact.safetensors": "fp32", "computed.safetensors": program.dtype}
    files = [consolidate(saved[max(saved)], out / name, dtype)[0] for name, dtype in dtypes.items()]
    return program.log(out), tuple(saved), *map(load_file, files)


def trouble(outcome: Outcome) -> str:
    """Why a run is not a good one; empty if it is."""
    if outcome.status:
        return str(outcome.status)
    told = [value for entry in outcome.log for key, value in entry.items() if "loss" in key or key == "accuracy"]
    if not told or not all(map(math.isfinite, told)) or (len(told) > 1 and len(set(told)) < 2):
        return f"losses {told}"
    return ""


def difference(outcome: Outcome, other: Outcome) -> str:
    """The first entry of the log, or the names of weights, that are not the same bits; empty if all are."""
    for entry, wanted in zip(outcome.log, other.log, strict=False):
        if entry != wanted:
            return f"logged {entry}, not {wanted}"
    if len(outcome.log) != len(other.log):
        return f"{len(outcome.log)} entries in the log, not {len(other.log)}"
    return unequal(outcome.weights, other.weights)


def unequal(weights: Weights, wanted: Weights) -> str:
    """The names of `wanted` whose values are others in `weights`, or not there; empty if all are."""
    names = [name for name, value in wanted.items() if name not in weights or not torch.equal(weights[name], value)]
    return f"other weights: {names}" if names else ""


def judge(
    program: Program,
    once: Outcome,
    first: Outcome,
    resumed: Outcome | None,
    expected: Outcome | None,
    loaded: Weights | str,
) -> dict[str, str | None]:
    """By column what is wrong, empty if nothing is, None where there is nothing to ask.

    once:    the run of this stage; `first` that of the first stage.
    resumed: from the checkpoint in the middle of `once`, None without one; what it is to equal but for its checkpoints
             is `expected`.
    loaded:  what plain torch loads, or why it does not.
    """
    why: dict[str, str | None] = dict.fromkeys(COLUMNS)
    bad = why["trained"] = trouble(once)
    if len(program.stages) > 1:
        why["same bits"] = bad or difference(once, first)
    if program.checkpoint is not None:
        why["saved"] = "" if once.saved == program.steps else f"checkpoints of the steps {once.saved}"
    if program.checkpoint is not None and program.resume:
        again = resumed or Outcome("not resumed")
        wanted, steps = expected or once, program.steps[1:]
        if program.in_place:
            wanted, steps = replace(wanted, log=wanted.log[program.steps[0] :]), program.steps
        began = "" if again.saved == steps else f"checkpoints of the steps {again.saved}"
        why["resumed"] = trouble(again) or began or difference(again, wanted)
    if program.load is not None:
        why["loaded"] = bad or (loaded if isinstance(loaded, str) else unequal(loaded, once.computed))
    return why


def at_stages(name: str, program: Program, script: Path, out: Path) -> dict[str, dict[str, str | None]]:
    """Run a program at its stages: by row of the table what is wrong by column."""
    shutil.rmtree(out, ignore_errors=True)
    data = out / "data"
    data.mkdir(parents=True)
    program.make(data)
    table: dict[str, dict[str, str | None]] = {}
    first = first_again = None
    for stage in program.stages:
        config = out / f"{stage}.json"
        config.write_text(json.dumps(settings(stage)))
        places = {"data": data, "config": config, "stage": stage}
        folder = out / str(stage)
        for file in (data / "hub").rglob("cache-*.arrow"):
            file.unlink()  # what a program has computed from a dataset it shall compute again
        once = run(program, script, folder, out / f"{stage}.log", **places)
        resumed, loaded = None, "not trained"
        if not once.status and program.load is not None:
            try:
                loaded = program.load(folder)
            except Exception as error:  # whatever it is, it goes into the table
                loaded = repr(error)
        if program.checkpoint is None and isinstance(loaded, dict):
            once = replace(once, weights=loaded)  # no checkpoint has them
        first = first or once
        if once.saved and program.resume:
            again = out / f"{stage}-resumed"
            resumed = run(program, script, again, out / f"{stage}-resumed.log", first=folder, **places)
        first_again = first_again or resumed
        expected = once if program.exact else first_again
        table[f"{name} stage {stage}"] = judge(program, once, first, resumed, expected, loaded)
        print(f"{name} stage {stage}: {table[f'{name} stage {stage}']}", flush=True)
    return table


def lines(table: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    """The table, and below it what is wrong."""
    cells = {
        name: ["-" if why is None else "no" if why else "yes" for why in row.values()] for name, row in table.items()
    }
    rows = [("", *COLUMNS), *((name, *row) for name, row in cells.items())]
    details = [f"{name}, {column}: {why}" for name, row in table.items() for column, why in row.items() if why]
    return [f"{name:30}" + "".join(f"{cell:>11}" for cell in cells) for name, *cells in rows] + details


def main(arguments: list[str]) -> int:
    """Run what is at hand of PROGRAMS, or those that are named after FOLDER, and print the table."""
    roots = [Path(*arguments[:1]).resolve(), Path(sysconfig.get_path("purelib"))]
    chosen = {name: PROGRAMS[name] for name in arguments[1:] or PROGRAMS}
    found = {
        name: root / each.script for name, each in chosen.items() for root in roots if (root / each.script).exists()
    }
    missing = [f"{name}: no {chosen[name].script} in {roots[0]}" for name in chosen if name not in found]
    if not arguments:
        print("PROGRAMS: wanted a folder with the source trees of programs", file=sys.stderr)
        return 2
    out = Path("out/programs").resolve()
    table: dict[str, dict[str, str | None]] = {}
    for name, script in found.items():
        table |= at_stages(name, chosen[name], script, out / name)
    print(*lines(table), *missing, sep="\n")
    return 1 if missing or any(why for row in table.values() for why in row.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
