"""The promise: each rank writes what it does as JSON lines while it runs, and what was written outlives its process."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import config, make_net, share

import zero
from zero.log import logger
from zero.monitor.monitor import _Writer
from zero.show.run import read
from zero.watchdog.hang_report import Phase
from zero.watchdog.rank_status import RankStatus

ROOT = Path(__file__).parents[2]


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    def refused(text: str) -> None:
        raise ValueError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refused) for line in (folder / f"rank-{rank}.jsonl").open()]


def train(folder: Path, steps: int, stage: int = 2, **more: Any) -> tuple[Any, list[float]]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    settings = config(stage, world, steps_per_print=float("inf"), zero={"report": str(folder)}, **more)
    engine, *_ = zero.initialize(model=make_net(), config=settings)
    engine.monitor.at_end.clear()  # no page: tests/monitor/test_report_at_end.py
    losses = []
    for number in range(steps):
        loss = engine(*share(number))
        engine.backward(loss, tokens=10)
        engine.step()
        losses.append(loss.item())
    return engine, losses


@pytest.mark.ranks(2)
def test_every_rank_writes_its_steps():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    rank, path = dist.get_rank(), Path(folder[0])
    engine, losses = train(path, 3)
    engine.destroy()
    dist.barrier()
    every = [None, None]
    dist.all_gather_object(every, losses)
    first, *steps, end = lines(path, rank)
    assert first["event"] == "start" and end["event"] == "end" and end["status"] == "ended"
    assert [each["step"] for each in steps] == [1, 2, 3] and all(each["event"] == "step" for each in steps)
    mean = [sum(pair) / 2 for pair in zip(*every, strict=True)]
    assert [each["loss"] for each in steps] == (mean if rank == 0 else losses)
    assert [each["tokens"] for each in steps] == [20 if rank == 0 else 10] * 3
    assert [each["samples"] for each in steps] == [4 if rank == 0 else 2] * 3
    assert [each["global_samples"] for each in steps] == [4, 8, 12]
    for each in steps:
        assert each["sent"] > 0 and set(each["phases"]) == {"forward", "backward", "step"}
        assert each["seconds"] >= sum(each["phases"].values())
        assert ("norm" in each) == ("lr" in each) == (rank == 0)
    assert set(steps[0]["bytes"]) == {"parameters", "gradients", "optimizer", "memory"}
    run = json.loads((path / "run.json").read_text())
    assert run["world"] == 2 and run["configuration"]["zero_optimization"]["stage"] == 2
    assert run["versions"]["torch"] == torch.__version__ and run["configuration"]["steps_per_print"] is None
    assert run["crowding"] >= torch.get_num_threads() / os.cpu_count()
    if rank == 0:
        assert run["plan"] == {kind: steps[0]["bytes"][kind] for kind in ("parameters", "optimizer")}
    net = make_net()
    assert sum(unit["numel"] for unit in run["units"]) == sum(param.numel() for param in net.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("locks", [True, False])
def test_a_second_engine_writes_beside_the_first(tmp_path, monkeypatch, locks):
    rank, said = dist.get_rank(), []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(listener)
    if not locks:  # as on some file systems
        monkeypatch.setattr(fcntl, "lockf", lambda *args: os.close(-1))
    path, beside = tmp_path / "run", tmp_path / "run-2"
    first, _ = train(path, 1)
    second, _ = train(path, 2)
    first.destroy()
    again, _ = train(path, 3)  # goes on
    second.destroy()
    again.destroy()
    logger.removeHandler(listener)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "run-2"]
    kinds = [line["event"] for line in lines(path, rank) if line["event"] != "warning"]
    assert kinds == ["start", "step", "end", "start", "step", "step", "step", "end"]
    assert [line["event"] for line in lines(beside, rank)] == ["start", "step", "step", "end"]
    text = f"zero.report: another engine or job writes into {path}; this one writes into {beside}"
    assert said == ([text] if rank == 0 else [])
    assert [len(read(folder).ranks) for folder in (path, beside)] == [2, 2]


def test_a_second_job_writes_beside_the_first(tmp_path):
    """And where it ends, whatever it left, the next goes on in its files."""
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    path = tmp_path / "run"
    path.mkdir()
    job = subprocess.Popen(
        [sys.executable, "-c", code, path / "rank-0.jsonl"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    job.stdout.readline()
    engines = [train(path, 1)[0]]
    job.kill()
    job.communicate()
    engines.append(train(path, 2)[0])
    wants = [sys.executable, "-c", code.replace("LOCK_EX", "LOCK_EX | fcntl.LOCK_NB"), path / "rank-0.jsonl"]
    assert b"BlockingIOError" in subprocess.run(wants, input=b"", capture_output=True).stderr, "it has the lock now"
    for engine in engines:
        engine.destroy()
    assert [sum(line["event"] == "step" for line in lines(tmp_path / name)) for name in ("run", "run-2")] == [2, 1]


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
    engine, _ = train(tmp_path, 0)
    engine.backward(engine(*share(0)) * float("nan"))
    engine.step()
    engine.destroy()
    (step,) = [line for line in lines(tmp_path) if line["event"] == "step"]
    assert step["loss"] is None and step["norm"] is None and step["skipped"] is True


def test_a_full_disk_is_one_warning(tmp_path):
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(listener)
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    engine, losses = train(tmp_path, 3)
    engine.destroy()
    logger.removeHandler(listener)
    assert len(losses) == 3 and len(said) == 1
    assert said[0].startswith("zero.report: nothing more is written there, and the run goes on: OSError")


def test_what_a_rank_does_now_is_told_when_it_changes():
    status = RankStatus(0)
    writer = _Writer(status)
    assert writer._phase().line()["phase"] == "outside"
    assert writer._phase().line() is None, "as before"
    status.phase = Phase.BACKWARD
    assert writer._phase().line()["phase"] == "backward"


def test_a_run_without_report_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine, *_ = zero.initialize(model=make_net(), config=config(0, 1))
    engine.backward(engine(*share(0)))
    engine.step()
    engine.destroy()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(("last", "status"), [("os.kill(os.getpid(), 9)", None), ("1 / 0", "failed"), ("", "ended")])
def test_what_was_written_outlives_the_process(tmp_path, last, status):
    code = f"""
        import os, sys, time
        from pathlib import Path
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests" / "monitor")!r}]
        from test_run_folder import train
        engine, _ = train(Path({str(tmp_path)!r}), 5)
        time.sleep(0.3)
        {last}
    """
    text = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", text], env=os.environ, check=False, timeout=120)
    assert done.returncode == {None: -signal.SIGKILL, "failed": 1, "ended": 0}[status]
    written = lines(tmp_path)
    assert [line["step"] for line in written if line["event"] == "step"] == [1, 2, 3, 4, 5]
    ends = [line for line in written if line["event"] == "end"]
    assert [line["status"] for line in ends] == ([] if status is None else [status])
    assert status != "failed" or ends[0]["error"] == "ZeroDivisionError: division by zero"
