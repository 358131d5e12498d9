"""A plugin of pytest for DeepSpeed's own tests: how their ranks start, and an end for those that wait in vain."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import pytest
import torch
from outcomes import pytest_runtest_logreport as pytest_runtest_logreport

# DeepSpeed cannot do it on a CPU; zero must.
_OTHERS_FAIL = re.compile("CPU( accelerator)? does not support this test.*", re.IGNORECASE)
SECONDS = 60  # for one test
GRACE = 5  # seconds for the other ranks of one that has failed
# Insides of DeepSpeed by which some tests of a file ask: here names stand for themselves, so that the file can be read.
for _inside in ("checkpoint.constants", "moe.sharded_moe", "runtime.tensor_parallel.config"):
    sys.modules[f"deepspeed.{_inside}"] = ModuleType(f"deepspeed.{_inside}")
    sys.modules[f"deepspeed.{_inside}"].__getattr__ = str
importlib.import_module("deepspeed.moe").sharded_moe = sys.modules["deepspeed.moe.sharded_moe"]  # `import ... as` asks


def pytest_configure() -> None:
    """Ranks are forked from a process that has imported what they need."""
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.set_forkserver_preload(["deepspeed.runtime.engine", "deepspeed.runtime.zero.partition_parameters"])


def pytest_collection_modifyitems() -> None:
    """Once their harness is there: it starts a pool, which waits for ever for the other ranks of one that failed."""
    pytest.skip = _skip_unless_zero_can
    from unit import common

    def launch(self: Any, ranks: int, init_method: str) -> None:
        if ranks > 4:
            _skip(f"wants {ranks} ranks")
        _launch(self, ranks, init_method, common.get_master_port())

    common.DistributedExec._launch_procs = launch


_skip = pytest.skip


def _skip_unless_zero_can(reason: str = "", **more: Any) -> None:
    if not _OTHERS_FAIL.fullmatch(reason):
        _skip(reason, **more)


_skip_unless_zero_can.Exception = _skip.Exception


# What their tests compare by works on GPUs only: DDP takes no name of a CPU as its device, and gloo gathers no scalars.
_ddp, _gather = torch.nn.parallel.DistributedDataParallel.__init__, torch.distributed.all_gather_into_tensor
_DEVICES = () if torch.cuda.is_available() else ("device_ids", "output_device")


def _ddp_on_cpu(self: Any, module: torch.nn.Module, **kwargs: Any) -> None:
    _ddp(self, module, **{key: value for key, value in kwargs.items() if key not in _DEVICES})


def _gather_scalars(gathered: torch.Tensor, mine: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _gather(gathered, mine.reshape(-1) if mine.ndim == 0 else mine, *args, **kwargs)


torch.nn.parallel.DistributedDataParallel.__init__ = _ddp_on_cpu
torch.distributed.all_gather_into_tensor = _gather_scalars


def _rank(test: Any, rank: int, ranks: int, port: str, init_method: str, pipe: Connection) -> None:
    pytest.skip = _skip_unless_zero_can
    try:
        said = "skipped", test._dist_run(rank, ranks, port, init_method)
    except BaseException as error:
        traceback.print_exc()
        said = "failed", f"{type(error).__name__}: {error}"
    pipe.send(said)
    os._exit(0)


def _launch(test: Any, ranks: int, init_method: str, port: str) -> None:
    """Run the test on so many ranks; skip or fail as the first that does."""
    context = multiprocessing.get_context("forkserver")
    running, end = {}, time.monotonic() + SECONDS
    said: dict[int, tuple[str, str]] = {}
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(test, rank, ranks, port, init_method, theirs), daemon=True)
        process.start()
        theirs.close()
        running[ours] = rank, process
    processes = [process for _, process in running.values()]
    while running and time.monotonic() < end:
        for pipe in wait(list(running), 1):
            rank, process = running.pop(pipe)
            try:
                said[rank] = pipe.recv()
            except EOFError:
                process.join()
                said[rank] = "failed", f"ended with status {process.exitcode}"
            if said[rank][0] == "failed":
                end = min(end, time.monotonic() + GRACE)
    for process in processes:
        process.kill()
        process.join()
    if failed := [f"rank {rank}: {text}" for rank, (kind, text) in sorted(said.items()) if kind == "failed"]:
        pytest.fail(failed[0], pytrace=False)
    if running:
        pytest.fail(f"no end after {SECONDS} s of ranks {sorted(rank for rank, _ in running.values())}", pytrace=False)
    if why := next((text for _, text in said.values() if text), ""):
        _skip(why)
