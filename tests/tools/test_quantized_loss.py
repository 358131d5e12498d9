"""The promise: with parameters and gradients in 8 bits on the wire, the example's validation loss is within 0.5 %."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt"
BOTH = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
SIZES = ("--width", "64", "--layers", "2", "--heads", "2", "--context", "64")


def validation_loss(launchers: Any, folder: Path, section: dict[str, bool]) -> float:
    """After 300 steps of the example at stage 3 on two ranks, of a small model."""
    settings = json.loads((EXAMPLE / "zero3.json").read_text())
    settings["zero_optimization"] |= section
    settings["scheduler"]["params"] |= {"total_num_steps": 300, "warmup_num_steps": 30}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    words = ("--config", str(folder / "config.json"), "--out", str(folder / "out"), *SIZES)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = launchers.run(
        "run", "--num_gpus", "2", str(EXAMPLE / "train.py"), *words, environment=environment, folder=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return float(re.search(r"validation loss ([\d.]+)", done.stdout).group(1))


@pytest.mark.long
def test_the_example_learns_as_well(launchers: Any, tmp_path: Path) -> None:
    exact, coded = (
        validation_loss(launchers, tmp_path / name, section) for name, section in (("exact", {}), ("coded", BOTH))
    )
    assert exact != coded
    assert coded == pytest.approx(exact, rel=0.005)
