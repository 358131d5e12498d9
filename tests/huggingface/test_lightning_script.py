"""The promise: the script of docs/lightning.md trains as it stands, on every stage, whoever starts its processes."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT
from marks import longer
from nodes import environment
from ports import free_port
from ranks import Pool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")


def run(script: str, stage: int, out: str) -> float:
    """Run it as this rank's own script; the metric of its validation."""
    argv, sys.argv = sys.argv, [script, str(stage), out]
    try:
        trainer = runpy.run_path(script, run_name="__main__")["trainer"]
    finally:
        sys.argv = argv
    value = trainer.callback_metrics["val"].item()
    trainer.strategy.engine.destroy()
    return value


@pytest.fixture
def script(tmp_path: Path) -> Path:
    page = (ROOT / "docs" / "lightning.md").read_text()
    path = tmp_path / "train.py"
    path.write_text(re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1])
    return path


def check(value: float, out: Path) -> None:
    assert value < 1.0, "it starts at 8"
    assert sorted(path.name for path in out.iterdir()) == ["best.ckpt", "weights.ckpt"]
    weights = torch.load(out / "weights.ckpt", weights_only=True)["state_dict"]
    assert {tuple(weight.shape) for weight in weights.values()} == {(64, 64), (64,), (1, 64), (1,)}


@pytest.mark.parametrize("stage", [3, *longer(1, 2)])
def test_the_script_of_the_page(pool: Pool, tmp_path: Path, script: Path, stage: int) -> None:
    first, second = pool.run(2, run, str(script), stage, str(tmp_path / "out"))
    assert first == second
    check(first, tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("by_zero", [True, False])
def test_whoever_starts_its_processes(launchers: Any, tmp_path: Path, script: Path, by_zero: bool) -> None:
    words, there = (str(script), "3", str(tmp_path / "out")), environment(OMP_NUM_THREADS="1")
    if by_zero:
        done = launchers.run("run", "--num_gpus", "2", *words, environment=there, folder=tmp_path)
    else:
        how = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 240, "check": False}
        done = subprocess.run([sys.executable, *words], env=there | {"MASTER_PORT": str(free_port())}, **how)
    assert done.returncode == 0, done.stderr
    check(float(re.findall(r"\bval\b[^\d\n]*([\d.]+)", done.stdout)[-1]), tmp_path / "out")
