"""Private names of torch stand in one file; those that no training here needs are asked, so that changes show."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from zero.core import torch_private as private

ROOT = Path(__file__).parents[2]
NAMES = re.compile(
    r"torch\._(?!dynamo|_version__)\w+|\._cdata\b|\._use_count\b|_execution_engine|\._backward_hooks\b(?!\.__)"
)


def test_they_stand_in_one_file():
    files = [path for path in (ROOT / "zero").rglob("*.py") if path.name != "torch_private.py"]
    lines = [f"{path.name}: {line.strip()}" for path in files for line in path.read_text().splitlines()]
    assert len(files) > 100
    assert [line for line in lines if NAMES.search(line.split("#")[0])] == []


def test_work_on_our_own_tensors_is_not_transformed():
    own, kinds = torch.ones(2), []

    @private.untransformed
    def work() -> None:
        kinds.append(torch._C._functorch.is_functorch_wrapped_tensor(own + own))

    torch.func.grad(lambda x: (work(), x.sum())[1])(torch.ones(2))
    assert kinds == [False]


def test_profilers_of_torch():
    assert not private.profiler_runs()
    with torch.profiler.profile(experimental_config=private.all_threads()) as profiler:
        assert private.profiler_runs()
        thread = threading.Thread(target=lambda: torch.ones(3).neg())
        thread.start()
        thread.join()
    assert "aten::neg" in {event.name for event in profiler.events()}


def test_options_of_nccl():
    options, limit = private.nccl_options(timedelta(seconds=7)), timedelta(seconds=7)
    if dist.is_nccl_available():
        assert (options.is_high_priority_stream, options._timeout) == (True, limit)
    else:
        assert options is None
