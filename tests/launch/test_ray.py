"""The promise: under Ray Train a run whose worker is killed ends with the bits of a run that nobody disturbs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from marks import needs
from nodes import environment, eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray" / "train.py"
STEPS, SAVED = 40, 10  # the second: of the checkpoint behind which a worker is killed
SECONDS = 400  # that no run takes, unless it hangs


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The example, with a Ray of its own, of which nothing is left."""
    words = [sys.executable, str(EXAMPLE), str(folder), str(STEPS)]
    quiet = environment(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0", RAY_ADDRESS="local")
    process = subprocess.Popen(words, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        rest = [*below(process), process] if process.poll() is None else []
        for each in rest:
            each.kill()
        process.wait(60)


def below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks; Ray gives its processes names of their own."""
    return [each for each in below(process) if each.is_running() and "RayTrainWorker" in "".join(each.cmdline())]


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    return said


def parts(folder: Path) -> dict[str, bytes]:
    """What the ranks wrote for the last step, by the names without that of the save."""
    files = (folder / f"step{STEPS}" / f"global_step{STEPS}").glob("*.safetensors")
    return {path.name.split(".")[0]: path.read_bytes() for path in files}


@pytest.mark.long
@needs("ray")
def test_a_killed_worker_changes_no_bit(tmp_path: Path) -> None:
    with training(tmp_path / "whole") as process:
        assert "goes on behind" not in ended(process)
    with training(tmp_path / "killed") as process:
        # Where Ray notes what was reported, some time behind the call that reported it.
        known = tmp_path / "killed" / "checkpoint_manager_snapshot.json"
        assert eventually(
            lambda: process.poll() is not None or (known.exists() and f"step{SAVED}" in known.read_text()), SECONDS
        )
        ranks = workers(process)
        assert len(ranks) == 2, process.communicate(timeout=SECONDS)[0]
        os.kill(ranks[1].pid, signal.SIGKILL)
        said = ended(process)
    (behind,) = set(map(int, re.findall(r"goes on behind step (\d+)", said)))  # Ray prints it twice
    assert SAVED <= behind < STEPS
    wanted, found = (parts(tmp_path / name) for name in ("whole", "killed"))
    assert sorted(wanted) == [
        f"{kind}-{rank:05}-of-00002" for kind in ("moments", "state", "weights") for rank in (0, 1)
    ]
    assert found == wanted
