"""The promise: the script of docs/lightning.md trains as it stands, on every stage, whoever starts its processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("by_zero", "stage"),
    [(True, 3), *(pytest.param(*case, marks=pytest.mark.long) for case in ((True, 1), (True, 2), (False, 3)))],
)
def test_the_script_of_the_page(launchers: Any, tmp_path: Path, by_zero: bool, stage: int) -> None:
    page = (ROOT / "docs" / "lightning.md").read_text()
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1])
    words = str(script), str(stage), str(out)
    if by_zero:
        done = launchers.run("run", "--num_gpus", "2", *words, environment=environment(), folder=tmp_path)
    else:
        more = {"MASTER_PORT": str(free_port())}
        command = [sys.executable, *words]
        done = subprocess.run(
            command, env=environment() | more, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
    assert done.returncode == 0, done.stderr
    value = float(re.findall(r"\bval\b[^\d\n]*([\d.]+)", done.stdout)[-1])
    assert value < 1.0, "it starts at 8"
    assert sorted(path.name for path in out.iterdir()) == ["best.ckpt", "weights.ckpt"]
    weights = torch.load(out / "weights.ckpt", weights_only=True)["state_dict"]
    assert {tuple(weight.shape) for weight in weights.values()} == {(64, 64), (64,), (1, 64), (1,)}
