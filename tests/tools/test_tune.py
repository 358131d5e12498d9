"""The promise: `zero tune` tries what its plan holds for the fastest, survives what fails, and writes the best."""

from __future__ import annotations

import argparse
import json
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import Launchers
from nodes import environment

from zero.config import load
from zero.launch.args.scripts import add_tune, tune_request
from zero.tools.tune.tuning import Tried, Tuned, next_row

Command = Callable[..., subprocess.CompletedProcess]

SCRIPT = """
    import sys, torch, zero

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randint(0, 5, (256,)))
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
    }
    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
            self.head = torch.nn.Linear(4, 5)
        def forward(self, x, targets):
            for block in self.blocks:
                x = torch.relu(block(x))
            return torch.nn.functional.cross_entropy(self.head(x), targets)
    engine, _, loader, _ = zero.initialize(model=WithLoss(), config=config, training_data=data)
    for x, targets in zero.data.RepeatingLoader(loader):
        engine.backward(engine(x, targets=targets))
        ...
        engine.step()
    print("never reached under zero tune")
"""


@pytest.fixture
def command(launchers: Launchers, tmp_path: Path) -> Command:
    """`zero tune` of a script with more lines in its loop, on two ranks."""

    def run(*words: str, lines: str = "", text: str = SCRIPT) -> subprocess.CompletedProcess:
        (tmp_path / "script.py").write_text(textwrap.dedent(text.replace("...", lines)))
        words = ("tune", "--ranks", "2", "--steps", "2", *words, "script.py")
        return launchers.run(*words, environment=environment(OMP_NUM_THREADS="1"), folder=tmp_path, seconds=400)

    return run


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "zero.tuned.json").read_text())


@pytest.mark.long
def test_the_best_configuration_is_written_and_keeps_the_global_batch(command: Command, tmp_path: Path) -> None:
    ended = command("--runs", "2", "--space", "stage,micro_batch")
    assert ended.returncode == 0, ended.stderr
    own, *others = [line for line in ended.stdout.splitlines() if "stage " in line and " x " in line][:3]
    assert own[2:].startswith("stage 1, 4 x 2 ") and len(others) == 2
    for line in (own, *others):
        planned, measured, spread, planned_bytes, nbytes = line.split()[-5:]
        assert float(planned) > 0 and float(measured) > 0 and float(spread) >= 0
        assert float(planned_bytes) >= 0 and float(nbytes) > 0
    assert sum(line.startswith("* ") for line in (own, *others)) == 1
    values = written(tmp_path)
    settings = load(values, 2)
    assert settings.train_batch_size == 16
    assert values["optimizer"] == {"type": "AdamW"}
    best = next(line for line in (own, *others) if line.startswith("* "))
    size, count = settings.train_micro_batch_size_per_gpu, settings.gradient_accumulation_steps
    assert best[2:].startswith(f"stage {settings.zero_optimization.stage}, {size} x {count} ")


@pytest.mark.long
def test_runs_that_take_too_much_memory_are_lines_of_the_table(command: Command, tmp_path: Path) -> None:
    greedy = "held = torch.ones(150_000_000 if len(x) > 1 else 1)"
    ended = command("--runs", "3", "--space", "micro_batch", "--memory", "0.4", lines=greedy)
    assert ended.returncode == 0, ended.stderr
    table = ended.stdout.split("\n\n")[0].splitlines()
    assert [line.endswith("out of memory") for line in table[1:]] == [" 1 x 8 " not in line for line in table[1:]]
    assert "The script's own, stage 1, 4 x 2, gave no time: out of memory." in ended.stdout
    assert written(tmp_path)["train_micro_batch_size_per_gpu"] == 1


@pytest.mark.long
def test_a_loader_that_does_not_ask_the_configuration_is_found_out(command: Command, tmp_path: Path) -> None:
    own = SCRIPT.replace("RepeatingLoader(loader)", "RepeatingLoader(torch.utils.data.DataLoader(data, 4))")
    ended = command("--runs", "1", "--space", "micro_batch", text=own)
    assert "the script gives 4 samples at once, and not 8: its loader does not ask the configuration" in ended.stdout
    assert written(tmp_path)["train_micro_batch_size_per_gpu"] == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('done')", "the script ended without a call of zero.initialize"),
        (SCRIPT.replace("...", "if engine.global_steps == 1: break"), "the script ended after 1 of 5 optimizer steps"),
        (SCRIPT.replace("relu(block(x))", "relu(block(x) * x.sum().item())"), "asks for values"),
        (SCRIPT.replace("...", "raise KeyError('sample 17')"), "exit status 1: KeyError: 'sample 17'"),
    ],
)
def test_a_script_that_cannot_be_tuned(command: Command, tmp_path: Path, text: str, said: str) -> None:
    ended = command(text=text)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert said in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
    assert not (tmp_path / "zero.tuned.json").exists()


def row(group: str, micro_batch: int, seconds: float, nbytes: float = 1e6, **more: Any) -> dict[str, Any]:
    name = f"stage {group}, {micro_batch} x 1"
    more = {"lacks": [], "sent": 1e6, **more}
    return {"name": name, "group": group, "micro_batch": micro_batch, "seconds": seconds, "bytes": nbytes, **more}


def test_the_best_of_each_group_comes_first_then_the_group_that_is_fastest() -> None:
    rows = [row(group, size, 1.0) for group in "0123" for size in (4, 2)]
    runs, order = [Tried({"name": "own"}, [[9.0]])], []
    while (found := next_row(rows, runs)) is not None:
        order.append((found["group"], found["micro_batch"]))
        runs.append(Tried(found, [[1.0 if found["group"] == "1" else 2.0]]))
    assert order == [("0", 4), ("1", 4), ("2", 4), ("1", 2), ("0", 2), ("2", 2), ("3", 4), ("3", 2)]


def test_what_cannot_fit_is_not_tried() -> None:
    rows = [row("0", 4, 1.0, 4e6), row("1", 4, 1.1, 3e6), row("2", 4, 1.2, lacks=["device: 9 GB of 8"])]
    runs = [Tried({"name": "own", "bytes": 4e6}, why="out of memory")]
    assert next_row(rows, runs) == rows[1]
    assert next_row(rows, [*runs, Tried(rows[1], why="exit status 1")]) is None
    runs = [Tried(rows[1], why="out of memory")]
    assert next_row(rows, runs) is None
    smaller = row("1", 2, 1.3, 5e6)  # takes more by the plan, which does not know all that grows with the micro-batch
    assert next_row([*rows, smaller], runs) == smaller


def test_the_table_says_what_was_tried_and_why_the_fastest_is() -> None:
    own, fast, near, dead = row("2", 4, 0.2), row("1", 8, 0.1, sent=5e5), row("0", 8, 0.1), row("3", 8, 0.1)
    runs = [
        Tried(own, [[0.408, 0.408, 0.408]]),
        Tried(fast, [[0.1, 0.102, 0.12]], 2_000_000),
        Tried(near, [[0.105, 0.105]]),
        Tried(dead, why="out of memory"),
    ]
    text = str(Tuned(runs, [own, fast, near, dead, row("3", 9, 1.0, lacks=["memory"])], {}, 61.4))
    lines = text.splitlines()
    assert lines[2].split() == ["*", "stage", "1,", "8", "x", "1", "100.0", "102.0", "10", "1", "2"]
    assert lines[4].split()[-4:] == ["1", "out", "of", "memory"]
    assert "4 runs in 61 s; 4 of 5 planned ones fit." in lines
    assert "stage 1, 8 x 1 takes 25% of the time of the script's own, stage 2, 4 x 1." in lines
    assert "It sends 0.5 MB in a step (own: 1.0), and computes 8 samples at once (own: 4)." in lines
    assert lines[-1] == "Within the spread of its steps: stage 0, 8 x 1."
    assert "own configuration is the fastest" in str(Tuned([runs[0], runs[3]], [own], {}, 1.0))


SAME = "no difference that the runs"


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        ([[0.1, 0.11, 0.12], [0.1, 0.1, 0.1]], [[0.1, 0.1, 0.11], [0.099, 0.099, 0.099]], SAME),
        ([[0.24, 0.24, 0.25], [0.1, 0.1, 0.1]], [[0.1, 0.1, 0.1], [0.098, 0.099, 0.1]], SAME),
        ([[0.2, 0.2, 0.21], [0.2, 0.21, 0.22]], [[0.1, 0.1, 0.1], [0.1, 0.11, 0.11]], "stage 2, 4 x 1 takes 50% of"),
        ([[0.1, 0.1, 0.1]], [[0.2, 0.2, 0.2]], "own configuration is the fastest"),
    ],
    ids=["equal", "slow first run", "twice as fast", "own is faster"],
)
def test_what_runs_cannot_tell_apart_is_no_difference(own: Any, other: Any, said: str) -> None:
    runs = [Tried(row("0", 4, 0.1), own), Tried(row("2", 4, 0.1), other)]
    tuned = Tuned(runs, [], {}, 1.0)
    assert said in str(tuned)
    assert (tuned.best is runs[1]) == ("takes" in said)


def test_the_script_runs_with_the_words_behind_it_and_with_what_was_set() -> None:
    parser = argparse.ArgumentParser()
    add_tune(parser)
    given = tune_request(parser.parse_args(["--space", "stage", "--set", "a.b=1", "train.py", "--lr", "3"]))
    assert given.command() == ["run", "--hostfile", "", "--set=a.b=1", "--", "train.py", "--lr", "3"]
