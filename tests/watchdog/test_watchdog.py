"""The promise: the watch costs two threads per engine that talks, and they go when the engine goes.

An exception that all ranks share, or that one catches in time, leaves training alone; a wait of the device, which the
host has gone on from, is named as one of the host is.
"""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nccl import on_fake_nccl
from launching import Launchers
from models import batch, config, make_net, share
from nodes import environment, eventually
from ranks import Pool, said_by
from stand_in_device import DEVICE

import zero


def watchers() -> int:
    return sum(thread.name.startswith("zero-") for thread in threading.enumerate())


def settled(wanted: int) -> int:
    """The number of threads, once it is `wanted` or after some seconds."""
    eventually(lambda: watchers() == wanted, 60)
    return watchers()


@pytest.mark.ranks(2)
def test_threads_end_with_destroy_and_with_garbage_collection() -> None:
    gc.collect()
    found = [settled(0)]  # of tests before
    first = zero.initialize(model=make_net(), config=config(3, 2))[0]
    second = zero.initialize(model=make_net(), config=config(1, 2))[0]
    found.append(watchers())
    first.destroy()
    found.append(settled(2))
    del first, second
    gc.collect()
    found.append(settled(0))
    assert found == [0, 4, 2, 0]


@pytest.mark.ranks(2)
def test_threads_end_with_the_process_group() -> None:
    gc.collect()
    settled(0)
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2))
    found = [watchers()]
    dist.destroy_process_group()
    found.append(settled(0))
    del engine
    assert found == [2, 0]


def test_a_world_of_one_starts_no_thread() -> None:
    before = set(threading.enumerate())  # other tests of this process may have some
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 1))
    assert not set(threading.enumerate()) - before
    engine.destroy()


def train_past(stage: int, raising: tuple[int, ...]) -> tuple[list[float], int]:
    """Train 4 steps; at the second the ranks in `raising` raise in forward, catch it, and try again."""
    rank, losses, raised = dist.get_rank(), [], 0
    model = make_net()
    bad = [1] if rank in raising else []
    engine, *_ = zero.initialize(model=model, config=config(stage, 2))

    def refuse(module: torch.nn.Module, args: Any) -> None:
        if engine.global_steps == 1 and bad:
            bad.pop()
            raise ValueError("bad batch")

    model.blocks[1].down.register_forward_pre_hook(refuse)
    for step in range(4):
        tokens, targets = (part[2 * rank : 2 * rank + 2] for part in batch(step, 4))
        try:
            loss = engine(tokens, targets)
        except ValueError:
            raised += 1
            loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, raised


@pytest.mark.parametrize(("stage", "raising"), [(3, (0, 1)), (1, (0, 1)), (1, (1,))])
def test_an_exception_that_is_caught_in_time_ends_nothing(pool: Pool, stage: int, raising: tuple[int, ...]) -> None:
    plain = pool.run(2, train_past, stage, ())
    results = pool.run(2, train_past, stage, raising)
    assert [raised for _, raised in results] == [int(rank in raising) for rank in range(2)]
    assert [losses for losses, _ in results] == [losses for losses, _ in plain]


def parted() -> str:
    """What rank 0 says of a forward that rank 1 does not take part in; rank 1 waits outside of the engine for that."""
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch) as device:
        engine, *_ = zero.initialize(model=make_net(), config=config(3, 2, zero={"timeout": 1.5}))
        store = dist.distributed_c10d._get_default_store()
        batch = [part.to(DEVICE) for part in share(0)]
        engine.backward(engine(*batch))
        engine.step()
        said = ""
        if dist.get_rank() == 0:
            said = said_by(lambda: engine(*batch))
            store.set("said", "")
        else:
            store.wait(["said"])
        device.on_way.clear()
        return said


def test_a_gather_that_never_ends_is_named_although_no_thread_waits_in_it(pool: Pool) -> None:
    said = pool.run(2, parted)[0]
    assert "rank 0 has waited for the gather of unit '" in said
    assert "in forward, the time-out (zero.timeout); rank 1: outside the engine since its step 1" in said


PROGRAM = """
import sys, torch, zero
from models import batch, config, make_net

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return tuple(part[0] for part in batch(index, 1))

engine, _, loader, _ = zero.initialize(model=make_net(), config=config(3, 2), training_data=Data())
workers = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork")
for tokens, targets in workers:
    engine.backward(engine(tokens, targets))
    engine.step()
sys.stdout.write(f"trained {engine.global_steps}\\n")
"""


@pytest.mark.long
def test_forked_workers_and_a_program_that_just_ends_do_no_harm(launchers: Launchers, tmp_path: Path) -> None:
    """Without destroy(): the process ends by itself, with exit code 0."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = launchers.run("run", "--num_gpus", "2", str(program), environment=environment())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (ended.stdout + ended.stderr).count("trained 8") == 2


LAST_MESSAGE = """
import sys, torch, zero
zero.init_distributed()
sys.setswitchinterval(60)  # no other thread has its turn, unless this one waits
for _ in range(5):
    torch.distributed.all_reduce(torch.ones(1024), async_op=True).wait()
"""


@pytest.mark.long
def test_a_program_that_ends_behind_a_message_is_not_aborted(launchers: Launchers, tmp_path: Path) -> None:
    """Gloo's threads drop the tensor, for which they need Python: torch 2.13 aborts where that has ended."""
    program = tmp_path / "program.py"
    program.write_text(LAST_MESSAGE)
    for _ in range(5):
        ended = launchers.run("run", "--num_gpus", "2", str(program), environment=environment())
        assert ended.returncode == 0, ended.stdout + ended.stderr
