"""The CPU kernels under AddressSanitizer and UBSan: csrc/tests/test_kernels.cpp, as `make sanitize` runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "csrc" / "tests" / "sanitize.py"
SKIPPED = 77  # of the script: this compiler has no sanitizers


@pytest.mark.long
def test_kernels_stay_in_their_arrays_and_agree_with_the_scalar_ones(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert "scalar" in next(line for line in lines if line.startswith("instruction sets that run here"))
    assert lines[-1].startswith("ok: ")
