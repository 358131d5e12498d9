"""`--bind_cores_to_rank` binds each rank to cores of its own, of those that the launcher may use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import environment

from zero.__main__ import main

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
SHOW = """
import json, os, sys
told = {key: os.environ[key] for key in ("RANK", "OMP_NUM_THREADS")}
sys.stdout.write(json.dumps({**told, "cores": sorted(os.sched_getaffinity(0)), "args": sys.argv[1:]}) + chr(10))
"""
needs_binding = pytest.mark.skipif(not CORES, reason="this system cannot bind a process to cores")


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What is said in place of a start."""
    assert main(["run", "--hostfile", "", "--bind_cores_to_rank", *flags, "--dry-run", __file__]) == 2
    return capsys.readouterr().err.removeprefix("zero run: error: ")


def launched(tmp_path: Path, *flags: str, threads: str | None = None) -> list[dict]:
    script = tmp_path / "script.py"
    script.write_text(SHOW)
    command = [sys.executable, "-m", "zero", "run", *flags, str(script), "a b", "$x"]
    there = environment(**({"OMP_NUM_THREADS": threads} if threads else {}))
    ended = subprocess.run(command, env=there, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    return sorted(found, key=lambda one: int(one["RANK"]))


@needs_binding
def test_each_rank_has_an_equal_part_of_the_cores(tmp_path):
    ranks = min(2, len(CORES))
    each = len(CORES) // ranks
    found = launched(tmp_path, "--num_gpus", str(ranks), "--bind_cores_to_rank")
    for rank, one in enumerate(found):
        assert one["cores"] == CORES[rank * each : (rank + 1) * each]
        assert one["OMP_NUM_THREADS"] == str(each)
        assert one["args"] == ["a b", "$x"]


@needs_binding
def test_the_cores_that_were_listed_and_the_threads_of_the_user(tmp_path):
    last = CORES[-1]
    (found,) = launched(tmp_path, "--num_gpus", "1", "--bind_cores_to_rank", "--bind_core_list", str(last), threads="7")
    assert found["cores"] == [last] and found["OMP_NUM_THREADS"] == "7"


@needs_binding
def test_what_cannot_be_bound_is_said_before_anything_starts(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    allowed = ", ".join(map(str, CORES[:16]))
    assert refused(capsys, "--bind_core_list", "999998").startswith(
        "--bind_core_list: core 999998 is not one that this machine gives to the launcher, which may run on " + allowed
    )
    said = f"{len(CORES)} cores are too few for {len(CORES) + 1} ranks"
    assert said in refused(capsys, "--num_gpus", str(len(CORES) + 1))


def test_a_system_without_binding_says_so(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    said = "--bind_cores_to_rank: this system has no way to bind a process to cores"
    assert refused(capsys).startswith(said)
