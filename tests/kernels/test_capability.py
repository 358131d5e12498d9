"""The promise: tests run with the CPU kernels that ATEN_CPU_CAPABILITY names, on every rank, and say with which."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import skip_all_without

ROOT = Path(__file__).parents[2]


def capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


def test_ranks_have_it(pool):
    assert pool.run(2, capability) == [capability()] * 2


def test_the_end_of_a_run_says_which():
    words = [sys.executable, "-m", "pytest", "--collect-only", "tests/kernels/test_capability.py"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    said = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert "torch's CPU kernels: DEFAULT (ATEN_CPU_CAPABILITY=default)" in said.splitlines()


def test_what_the_cpu_lacks_skips_the_run():
    cpuinfo = "processor\t: 0\nflags\t\t: fpu avx2 fma avx512f avx512vl\nbugs\t\t:\n"
    for fine in ("", "default", "avx2"):
        skip_all_without(fine, cpuinfo)
    with pytest.raises(pytest.exit.Exception, match=r"=avx512, and this CPU lacks avx512bw, avx512dq$") as ended:
        skip_all_without("avx512", cpuinfo)
    assert ended.value.returncode == 0
    with pytest.raises(pytest.exit.Exception, match=r"=avx2, and this CPU lacks avx2, fma$"):
        skip_all_without("avx2", "")
