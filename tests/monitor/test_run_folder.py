"""The promise: each rank writes what it does as JSON lines while it runs, and what was written outlives its process."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import config, make_net, share
from nodes import environment
from ranks import listening

import zero
from zero.log import logger
from zero.tools.report.written_run import read


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    def refused(text: str) -> None:
        raise ValueError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refused) for line in (folder / f"rank-{rank}.jsonl").open()]


def events(folder: Path, rank: int = 0) -> list[str]:
    return [line["event"] for line in lines(folder, rank) if line["event"] not in ("warning", "phase")]


def train(folder: Path, steps: int, factor: float = 1.0) -> tuple[Any, list[float]]:
    """An engine, and the losses of some steps."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    engine, *_ = zero.initialize(model=make_net(), config=config(2, world, zero={"report": str(folder)}))
    losses = []
    for number in range(steps):
        loss = engine(*share(number)) * factor
        engine.backward(loss, tokens=10)
        engine.step()
        losses.append(loss.item())
    return engine, losses


def on_rank(folder: Path, steps: int) -> list[float]:
    engine, losses = train(folder, steps)
    engine.destroy()
    return losses


def test_every_rank_writes_its_steps(pool: Any, tmp_path: Path):
    every = pool.run(2, on_rank, tmp_path, 3)
    mean = [sum(pair) / 2 for pair in zip(*every, strict=True)]
    run = json.loads((tmp_path / "run.json").read_text())
    for rank, losses in enumerate(every):
        first, *steps, end = [line for line in lines(tmp_path, rank) if line["event"] != "phase"]
        assert first["event"] == "start" and end["event"] == "end" and end["status"] == "ended"
        assert [each["step"] for each in steps] == [1, 2, 3] and all(each["event"] == "step" for each in steps)
        assert [each["loss"] for each in steps] == (mean if rank == 0 else losses)
        assert [each["tokens"] for each in steps] == [20 if rank == 0 else 10] * 3
        assert [each["samples"] for each in steps] == [4 if rank == 0 else 2] * 3
        assert [each["global_samples"] for each in steps] == [4, 8, 12]
        for each in steps:
            assert each["sent"] > 0 and set(each["phases"]) == {"forward", "backward", "step"}
            assert each["seconds"] >= sum(each["phases"].values())
            assert ("norm" in each) == ("lr" in each) == (rank == 0)
        assert set(steps[0]["bytes"]) == {"parameters", "gradients", "optimizer", "memory"}
        if rank == 0:
            assert run["plan"] == {kind: steps[0]["bytes"][kind] for kind in ("parameters", "optimizer")}
    assert run["world"] == 2 and run["configuration"]["zero_optimization"]["stage"] == 2
    assert run["versions"]["torch"] == torch.__version__ and run["configuration"]["steps_per_print"] is None
    assert run["crowding"] >= 1 / os.cpu_count()
    assert sum(unit["numel"] for unit in run["units"]) == sum(param.numel() for param in make_net().parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("locks", [True, False])
def test_a_second_engine_writes_beside_the_first(tmp_path, monkeypatch, locks):
    rank = dist.get_rank()
    if not locks:  # as on some file systems
        monkeypatch.setattr(fcntl, "lockf", lambda *args: os.close(-1))
    path, beside = tmp_path / "run", tmp_path / "run-2"
    with listening() as texts:
        first, _ = train(path, 1)
        second, _ = train(path, 2)
        first.destroy()
        again, _ = train(path, 3)  # goes on
        second.destroy()
        again.destroy()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "run-2"]
    assert events(path, rank) == ["start", "step", "end", "start", "step", "step", "step", "end"]
    assert events(beside, rank) == ["start", "step", "step", "end"]
    text = f"zero.report: another engine or job writes into {path}; this one writes into {beside}"
    assert texts == ([text] if rank == 0 else [])
    assert [len(read(folder).ranks) for folder in (path, beside)] == [2, 2]


LOCKS = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"


def test_a_second_job_writes_beside_the_first(tmp_path):
    """And where it ends, whatever it left, the next goes on in its files."""
    path = tmp_path / "run"
    path.mkdir()
    file = path / "rank-0.jsonl"
    job = subprocess.Popen([sys.executable, "-c", LOCKS, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    job.stdout.readline()
    engines = [train(path, 1)[0]]
    job.kill()
    job.communicate()
    engines.append(train(path, 2)[0])
    wants = [sys.executable, "-c", LOCKS.replace("LOCK_EX", "LOCK_EX | fcntl.LOCK_NB"), file]
    assert b"BlockingIOError" in subprocess.run(wants, input=b"", capture_output=True).stderr, "it has the lock now"
    for engine in engines:
        engine.destroy()
    assert [events(tmp_path / name).count("step") for name in ("run", "run-2")] == [2, 1]


def test_what_is_warned_of_is_there_and_how_it_ended(tmp_path):
    engine, _ = train(tmp_path, 1)
    logger.warning("something %s", "is odd")
    try:
        raise RuntimeError("no more data")
    except RuntimeError:
        engine.destroy()
    *_, warning, end = lines(tmp_path)
    assert (warning["event"], warning["text"]) == ("warning", "something is odd")
    assert (end["status"], end["error"]) == ("failed", "RuntimeError: no more data")
    logger.warning("nobody listens any more")
    assert lines(tmp_path)[-1] == end


def test_numbers_that_are_not_finite_are_null(tmp_path):
    train(tmp_path, 1, float("nan"))[0].destroy()
    (step,) = [line for line in lines(tmp_path) if line["event"] == "step"]
    assert step["loss"] is None and step["norm"] is None and step["skipped"] is True


def test_a_full_disk_is_one_warning(tmp_path):
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    with listening() as said:
        assert len(on_rank(tmp_path, 3)) == 3
    assert len(said) == 1
    assert said[0].startswith("zero.report: nothing more is written there, and the run goes on: OSError")


OUTLIVED = """
import os, sys, time
from pathlib import Path
sys.path.append(sys.argv[2])
from test_run_folder import train
engine, _ = train(Path(sys.argv[1]), 5)
time.sleep(0.3)
"""


@pytest.mark.long
@pytest.mark.parametrize(("last", "status"), [("os.kill(os.getpid(), 9)", None), ("1 / 0", "failed"), ("", "ended")])
def test_what_was_written_outlives_the_process(tmp_path, last, status):
    words = [sys.executable, "-c", OUTLIVED + last, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(words, env=environment(), check=False, timeout=120)
    assert done.returncode == {None: -signal.SIGKILL, "failed": 1, "ended": 0}[status]
    written = lines(tmp_path)
    assert [line["step"] for line in written if line["event"] == "step"] == [1, 2, 3, 4, 5]
    ends = [line for line in written if line["event"] == "end"]
    assert [line["status"] for line in ends] == ([] if status is None else [status])
    assert status != "failed" or ends[0]["error"] == "ZeroDivisionError: division by zero"


def test_a_run_without_report_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine, *_ = zero.initialize(model=make_net(), config=config(0, 1))
    engine.backward(engine(*share(0)))
    engine.step()
    engine.destroy()
    assert list(tmp_path.iterdir()) == []
