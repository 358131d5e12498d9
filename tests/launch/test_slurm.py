"""The promise: ranks train under a real Slurm, over two nodes, started by srun or by `zero run --launcher slurm`.

Both end with the weights of one process that no launcher has started. See test_slurm_jobs.py for batch jobs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from nodes import environment
from slurm import RANK, Slurm, lines

STEPS = 8


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights that one process ends with."""
    folder = tmp_path_factory.mktemp("alone")
    words = [sys.executable, RANK, str(folder), str(STEPS)]
    subprocess.run(words, env=environment(OMP_NUM_THREADS="1"), capture_output=True, check=True)
    return lines(folder / "hash")[0][0]


def test_srun_over_two_nodes(slurm: Slurm, wanted: str, tmp_path: Path) -> None:
    done = slurm.run("srun", "-N", "2", "-n", "2", sys.executable, RANK, str(tmp_path), str(STEPS))
    assert done.returncode == 0, done.stderr
    begun = sorted((int(rank), node) for _, rank, _, node in lines(tmp_path / "begun"))
    assert begun == [(0, "node1"), (1, "node2")]
    assert lines(tmp_path / "hash") == [[wanted]]


def test_zero_run_in_an_allocation(slurm: Slurm, wanted: str, tmp_path: Path) -> None:
    ours = [sys.executable, "-m", "zero", "run", "--launcher", "slurm", "--num_gpus", "1"]
    done = slurm.run("salloc", "-N", "2", *ours, RANK, str(tmp_path), str(STEPS))
    assert done.returncode == 0, done.stderr
    assert {node for *_, node in lines(tmp_path / "begun")} == {"node1", "node2"}
    assert lines(tmp_path / "hash") == [[wanted]]
    said = [line for line in done.stderr.splitlines() if not line.startswith(("[node", "salloc: "))]
    assert said == [], "neither the launcher nor srun has anything to complain of"


def test_a_failed_rank_ends_all_with_its_status(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)\n")
    ours = [sys.executable, "-m", "zero", "run", "--launcher", "slurm", "--num_gpus", "1"]
    done = slurm.run("salloc", "-N", "2", *ours, str(script))
    assert done.returncode == 3, done.stderr
    assert "zero run: rank 1 on host node2 failed first, with exit code 3" in done.stderr
