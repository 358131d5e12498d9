"""The promise: bytes that `zero plan` says before the start are those that two ranks take and send, as in
benchmarks/plan.py: each kind within 3 %, the peak of all tensors within 5 %, what left the process within 1 %.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from marks import longer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import plan as benchmark
from plan import ROWS

from zero.sizes.rates import DEVICES

SMALL = dataclasses.replace(benchmark.SIZES, width=128, layers=4, context=64)
FEW = 17  # stage 3, all blocks recomputed


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [FEW, *longer(*({*range(len(ROWS))} - {FEW}))])
def test_bytes_are_those_of_the_plan(number, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "SIZES", SMALL)
    row = ROWS[number]
    planned = benchmark.plan(row, str(tmp_path), DEVICES["h100"])
    seen = benchmark.try_row(dist.get_rank(), row, str(tmp_path))
    assert planned.nbytes.peak > planned.nbytes.kept > 0 < planned.nbytes.sent
    if dist.get_rank() == 0:
        assert not benchmark.wrong(planned, seen), (planned.nbytes, seen.nbytes)
