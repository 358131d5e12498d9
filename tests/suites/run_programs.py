"""Runs programs that others wrote, unchanged, behind `zero run --as-deepspeed`: `make programs PROGRAMS=FOLDER`.

FOLDER has their source trees, or some of them; they are no part of this repository. TRL's scripts are those of the
installed library. Each program runs on two CPU ranks, at each of its stages once through and once more from a
checkpoint in the middle. The exit status is 1 if a cell of the table is not "yes"; lines below the table say why.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parents[1]), str(_HERE.parent)]
from huggingface_cases import (  # noqa: E402
    GRPO,
    KEPT,
    STEPS,
    TIMES,
    TRL,
    logged,
    make_model,
    settings,
    without,
    words,
    write_rows,
)

from zero.checkpoint.model_files import consolidate  # noqa: E402

PATIENCE = 300  # seconds for one run
COLUMNS = ("trained", "saved", "same bits", "resumed", "loaded")
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Program:
    """One program and how its runs are judged.

    In words, {data}, {out} and {config} are paths, of what `make` has written, of the run's own folder and of a file
    with the JSON of docs/huggingface.md; {stage} is a number; in those of a resume {first} is the folder of the run
    that went on. `log` and `load` are given a run's folder: its entries by step, without times, and the weights of what
    it has saved by plain torch or Transformers. `checkpoint` is the folder with zero's index, None where it saves none.
    """

    script: str  # below FOLDER, or below the installed packages
    words: list[str]
    make: Callable[[Path], None]
    load: Callable[[Path], Weights] | None
    resume: list[str] = field(default_factory=lambda: ["--resume_from_checkpoint", f"{{first}}/checkpoint-{KEPT}"])
    checkpoint: str | None = "checkpoint-{step}/global_step{step}"
    log: Callable[[Path], list[dict[str, Any]]] = logged
    # False where plain Transformers draws other masks after a resume, too: then resumes of all stages are compared.
    exact: bool = True
    stages: tuple[int, ...] = (0, 2, 3)
    steps: tuple[int, int] = (KEPT, STEPS)  # after which it saves


@dataclass(frozen=True)
class Outcome:
    """What a run has left."""

    status: int | str
    log: list[dict[str, Any]] = field(default_factory=list)
    saved: tuple[int, ...] = ()  # the steps of its checkpoints
    weights: Weights = field(default_factory=dict)  # of the last one


def write_text(data: Path) -> None:
    """A tiny language model and 4 KiB of sums."""
    make_model(data / "model")
    (data / "text.txt").write_text("\n".join(f"{a}+{b}={a + b}" for a in range(24) for b in range(24)))


def write_trl(name: str, data: Path) -> None:
    """A tiny language model and what a script of TRL trains on."""
    make_model(data / "model")
    write_rows(data / "rows", name)


def write_letters(data: Path) -> None:
    """A cache of the hub with a tiny Bert, a text of letters, and pairs, labelled by the half of the alphabet."""
    import hub  # Transformers and datasets take seconds to import

    hub.make(data / "hub", [_BERT])
    draw = random.Random(0)
    halves = [string.ascii_lowercase[13 * (number % 2) :][:13] for number in range(256)]
    rows = [[" ".join(draw.choices(half, k=6)) for _ in range(2)] for half in halves]
    pairs = [
        {"sentence1": first, "sentence2": second, "label": number % 2} for number, (first, second) in enumerate(rows)
    ]
    (data / "text.txt").write_text("\n".join(map(" ".join, rows)))
    (data / "pairs.json").write_text("\n".join(map(json.dumps, pairs)))


def logged_by_trl(folder: Path) -> list[dict[str, Any]]:
    """The same as `logged` but for TRL's count of tokens, which is in no checkpoint of SFT and DPO."""
    return [without(entry, ["num_tokens"]) for entry in logged(folder)]


def evaluated(folder: Path) -> list[dict[str, Any]]:
    """`logged`, and the evaluation at the end."""
    return [*logged(folder), without(json.loads((folder / "eval_results.json").read_text()), TIMES)]


def from_pretrained(kind: str, folder: Path) -> Weights:
    """The weights of a saved model as Transformers loads it without zero; ValueError where it misses some."""
    import transformers

    model, found = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    if found["missing_keys"] or found["unexpected_keys"]:
        raise ValueError(f"from_pretrained: {found}")
    return model.state_dict()


_BERT = "bert-base-cased"
_EXAMPLES = "transformers/examples/pytorch"
_CAUSAL = partial(from_pretrained, "AutoModelForCausalLM")
_MODEL = {"model_name_or_path": "{data}/model", "output_dir": "{out}", "deepspeed": "{config}"}
_TRAINER = {
    **{key: value for key, value in TRL.items() if key not in ("dtype", "bf16", "gradient_checkpointing")},
    "do_train": "True",
}
_EVALUATED = {**_MODEL, "model_name_or_path": _BERT, **_TRAINER, "do_eval": "True", "max_eval_samples": 16}
PROGRAMS = {
    "run_clm.py": Program(
        f"{_EXAMPLES}/language-modeling/run_clm.py",
        words({**_MODEL, **_TRAINER, "train_file": "{data}/text.txt", "block_size": 32}),
        write_text,
        _CAUSAL,
        stages=(0, 1, 2, 3),
    ),
    "run_mlm.py": Program(
        f"{_EXAMPLES}/language-modeling/run_mlm.py",
        words({**_EVALUATED, "train_file": "{data}/text.txt", "max_seq_length": 32}),
        write_letters,
        partial(from_pretrained, "AutoModelForMaskedLM"),
        log=evaluated,
        exact=False,
    ),
    "run_glue.py": Program(
        f"{_EXAMPLES}/text-classification/run_glue.py",
        words({**_EVALUATED, **dict.fromkeys(("train_file", "validation_file"), "{data}/pairs.json")}),
        write_letters,
        partial(from_pretrained, "AutoModelForSequenceClassification"),
        log=evaluated,
    ),
    **{
        f"{name}.py": Program(
            f"trl/scripts/{name}.py",
            words({**_MODEL, **TRL, "dataset_name": "{data}/rows", **more}),
            partial(write_trl, name),
            _CAUSAL,
            log=logged_by_trl,
        )
        for name, more in (("sft", {}), ("dpo", {}), ("grpo", GRPO))
    },
}


def run(program: Program, script: Path, out: Path, log: Path, **places: Any) -> Outcome:
    """Run a program once, on two ranks; what it prints goes to the file `log`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (_HERE.parents[1], _HERE.parent, _HERE / "stand_ins"))),
        "HF_HOME": str(out.parent / "data" / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # else each run compiles all its libraries anew
    }
    given = [*program.words, *(program.resume if "first" in places else [])]
    line = ["-m", "zero", "run", "--as-deepspeed", "--num_gpus", "2", str(script)]
    line += [word.format(out=out, **places) for word in given]
    out.mkdir(parents=True)
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


def left(program: Program, out: Path) -> tuple[list[dict[str, Any]], tuple[int, ...], Weights]:
    """What a run that ended well has left in its folder: entries of its log, steps and weights of its checkpoints."""
    if program.checkpoint is None:
        return program.log(out), (), {}
    saved = {step: out / program.checkpoint.format(step=step) for step in program.steps}
    saved = {step: folder for step, folder in saved.items() if folder.is_dir()}
    if not saved:
        return program.log(out), (), {}
    (file,) = consolidate(saved[max(saved)], out / "consolidated.safetensors")
    return program.log(out), tuple(saved), load_file(file)


def trouble(outcome: Outcome) -> str:
    """Why a run is not a good one; empty if it is."""
    if outcome.status:
        return str(outcome.status)
    losses = [value for entry in outcome.log for key, value in entry.items() if "loss" in key]
    if not all(map(math.isfinite, losses)) or len(set(losses)) < 2:
        return f"losses {losses}"
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
) -> dict[str, str]:
    """By column what is wrong, empty if nothing is.

    once:    the run of this stage; `first` that of the first stage.
    resumed: from the checkpoint in the middle of `once`, None without one; what it is to equal but for its checkpoints
             is `expected`.
    loaded:  what plain torch loads, or why it does not.
    """
    why = dict.fromkeys(COLUMNS, "")
    bad = why["trained"] = trouble(once)
    why["same bits"] = bad or difference(once, first)
    if program.checkpoint is not None:
        why["saved"] = "" if once.saved == program.steps else f"checkpoints of the steps {once.saved}"
        again = resumed or Outcome("not resumed")
        began = "" if again.saved == program.steps[1:] else f"checkpoints of the steps {again.saved}"
        why["resumed"] = trouble(again) or began or difference(again, expected or once)
    if program.load is not None:
        why["loaded"] = bad or (loaded if isinstance(loaded, str) else unequal(loaded, once.weights))
    return why


def at_stages(name: str, program: Program, script: Path, out: Path) -> dict[str, dict[str, str]]:
    """Run a program at its stages: by row of the table what is wrong by column."""
    shutil.rmtree(out, ignore_errors=True)
    data = out / "data"
    program.make(data)
    table: dict[str, dict[str, str]] = {}
    first = first_again = None
    for stage in program.stages:
        config = out / f"{stage}.json"
        config.write_text(json.dumps(settings(stage)))
        places = {"data": data, "config": config, "stage": stage}
        folder = out / str(stage)
        once = run(program, script, folder, out / f"{stage}.log", **places)
        first = first or once
        resumed, loaded = None, "not trained"
        if not once.status and program.checkpoint is not None:
            again = out / f"{stage}-resumed"
            resumed = run(program, script, again, out / f"{stage}-resumed.log", first=folder, **places)
        first_again = first_again or resumed
        expected = once if program.exact else first_again
        if not once.status and program.load is not None:
            try:
                loaded = program.load(folder)
            except Exception as error:  # whatever it is, it goes into the table
                loaded = repr(error)
        table[f"{name} stage {stage}"] = judge(program, once, first, resumed, expected, loaded)
        print(f"{name} stage {stage}: {table[f'{name} stage {stage}']}", flush=True)
    return table


def lines(table: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The table, and below it what is wrong."""
    rows = [("", *COLUMNS), *((name, *("no" if why else "yes" for why in row.values())) for name, row in table.items())]
    details = [f"{name}, {column}: {why}" for name, row in table.items() for column, why in row.items() if why]
    return [f"{name:28}" + "".join(f"{cell:>11}" for cell in cells) for name, *cells in rows] + details


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
    table: dict[str, dict[str, str]] = {}
    for name, script in found.items():
        table |= at_stages(name, chosen[name], script, out / name)
    print(*lines(table), *missing, sep="\n")
    return 1 if missing or any(why for row in table.values() for why in row.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
