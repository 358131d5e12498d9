"""The promise: an update in host memory that fails is named, ends all ranks at once, and leaves a plain module.

Nor do threads outlive their engine, and a process that ends while updates run neither hangs nor takes along what
others still read.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_hosts import read_until
from marks import longer
from models import config, make_net, share, step
from nodes import environment, eventually
from offload_cases import BOTH, GPU, OPTIMIZER, as_on_a_gpu
from ranks import said_by
from torch import nn

import zero
from zero.memory.pending_update import PendingUpdate, Waits


def fail_at_second(engine: Any) -> None:
    update, calls = engine.optimizer.shard_optimizer.update, []

    def second_raises(*args: Any, **kwargs: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        update(*args, **kwargs)

    engine.optimizer.shard_optimizer.update = second_raises


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "places", "ranks", "apart"),
    [
        (1, OPTIMIZER, (0, 1), False),
        (2, OPTIMIZER, (1,), True),
        (3, BOTH, (0, 1), True),
        (2, {"offload_optimizer": GPU}, (1,), True),
        *longer((3, OPTIMIZER, (1,), False)),
    ],
)
def test_an_update_that_fails_is_named_everywhere(stage, places, ranks, apart):
    """A step that fails on some ranks in its second update, and what the engine says from then on."""
    net, rank = make_net(blocks=2), dist.get_rank()
    with as_on_a_gpu(apart):
        section = {"zero_optimization": {"stage": stage, **places}}
        engine, *_ = zero.initialize(model=net, config=config(stage, 2, **section))
    step(engine, 0)
    engine.optimizer.settle()
    if rank in ranks:
        fail_at_second(engine)
    tried = (said_by(lambda number=number: step(engine, number)) for number in range(1, 4))
    said = [next(text for text in tried if text != "nothing")]
    said += [said_by(lambda: engine(*share(2))), said_by(lambda: step(engine, 3))]
    if rank in ranks:
        assert "half updated" in said[1] and "Call destroy()" in said[1]
        if stage < 3:
            said.append(said_by(lambda: [param.sum() for param in net.parameters()]))
    # Where both fail, one may hear of the other's failure first.
    why = "failed on rank {} with OSError: [Errno 28] No space left on device"
    texts = [f"the update of unit 'blocks.0' {why.format(each)}" for each in ranks]
    assert all(any(text in each for text in texts) for each in said)
    engine.destroy()
    assert all(type(param) is nn.Parameter and not hasattr(param, "_zero_owner") for param in net.parameters())
    loss = net(*share(2))
    loss.backward()
    assert stage == 3 or math.isfinite(loss.item())


def updaters() -> int:
    return sum(thread.name.startswith("zero-updates") for thread in threading.enumerate())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [3, *longer(1)])
def test_each_engine_has_one_thread_which_ends_with_it(stage):
    section = {"zero_optimization": {"stage": stage, **OPTIMIZER}}
    engines = [zero.initialize(model=make_net(), config=config(stage, 2, **section))[0] for _ in range(2)]
    assert updaters() == 0
    for number in range(3):
        for each in range(2):
            step(engines[each], number)
    assert updaters() == 2
    engines.pop().destroy()
    assert eventually(lambda: updaters() == 1)
    engines.clear()
    gc.collect()
    assert eventually(lambda: updaters() == 0)


PROGRAM = """
import signal, sys, threading, torch, torch.distributed as dist, zero
from models import batch, config, make_net

how, world = sys.argv[1], int(sys.argv[2])
section = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
engine, *_ = zero.initialize(model=make_net(), config=config(1, world, zero_optimization=section))
rank, update = engine.global_rank, engine.optimizer.shard_optimizer.update

interrupted = threading.Event()

def interrupt(number, frame):
    interrupted.set()
    raise KeyboardInterrupt

def slow(*args, **kwargs):
    interrupted.wait(240 if how == "interrupt" else 0.3)
    update(*args, **kwargs)

engine.optimizer.shard_optimizer.update = slow
signal.signal(signal.SIGINT, interrupt)
tokens, targets = (part[2 * rank : 2 * rank + 2] for part in batch(0, 2 * world))
engine.backward(engine(tokens, targets))
engine.step()
if how == "interrupt":
    sys.stdout.write("stepped\\n")
    sys.stdout.flush()
    engine(tokens, targets)
if how == "raise":
    raise ArithmeticError("of the user")
if how == "read" and rank == 0:
    whole = sum(value.double().sum() for value in engine.module.state_dict().values())
    sys.stdout.write(f"read {bool(torch.isfinite(whole))}\\n")
if how == "read" and dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The program's file."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


@pytest.mark.long
def test_a_rank_may_read_what_another_has_still_to_send_its_program_ends(launchers, program):
    ended = launchers.run("run", "--num_gpus", "2", program, "read", "2", environment=environment())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "read True" in ended.stdout
    assert "half updated" not in ended.stdout + ended.stderr


def test_an_exception_or_ctrl_c_may_end_a_program_while_updates_run(program):
    """Ctrl-C while a forward waits for an update."""
    pipe, both = subprocess.PIPE, {}
    for how in ("raise", "interrupt"):
        command = [sys.executable, program, how, "1"]
        both[how] = subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe)
    try:
        read_until(both["interrupt"].stdout, b"stepped\n")
        both["interrupt"].send_signal(signal.SIGINT)
        said = {how: process.communicate(timeout=240)[1].decode() for how, process in both.items()}
    finally:
        for process in both.values():
            process.kill()
    assert (both["raise"].returncode, both["interrupt"].returncode) == (1, -signal.SIGINT), said
    assert "ArithmeticError: of the user" in said["raise"] and "half updated" not in said["raise"]
    assert said["interrupt"].strip().endswith("KeyboardInterrupt")


def test_wherever_ctrl_c_ends_a_wait_the_update_still_ends_and_can_be_waited_for():
    interrupted = True
    for moment in itertools.count(1):
        pending = PendingUpdate(Waits())
        worker = threading.Timer(0.002, pending.run, [int])
        worker.start()
        try:
            with interrupt_at(moment):
                pending.result()
            interrupted = False
        except KeyboardInterrupt:
            pass
        worker.join(60)
        assert not worker.is_alive(), f"interrupted at {moment}"
        assert pending.result() == 0
        if not interrupted:
            break
    assert moment > 20


@contextlib.contextmanager
def interrupt_at(moment: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before so many steps of the interpreter inside of the functions that are called."""
    steps = iter(range(1, moment))

    def trace(frame: Any, event: str, arg: object) -> Any:
        frame.f_trace_opcodes = True
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stops", [False, True])
def test_an_update_that_only_one_rank_still_runs_holds_nobody_up(stops):
    """Forwards that end, or are left, while one rank alone still updates units that the other one fetches ahead."""
    section = {"zero_optimization": {"stage": 3, **OPTIMIZER}}
    engine, *_ = zero.initialize(model=make_net(), config=config(3, dist.get_world_size(), **section))
    found = [step(engine, number).item() for number in range(2)]
    engine.optimizer.settle()
    update, reached = engine.optimizer.shard_optimizer.update, threading.Event()

    def held_up(unit: Any, *args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 1 and unit.plan.name == "blocks.2":
            reached.wait(60)
        update(unit, *args, **kwargs)

    engine.optimizer.shard_optimizer.update = held_up
    step(engine, 2)

    def leave(*args: Any) -> None:
        reached.set()
        if stops:
            raise ArithmeticError

    handle = engine.module.blocks[0].norm.register_forward_pre_hook(leave)  # inside of the block
    with torch.no_grad(), contextlib.suppress(ArithmeticError):
        engine.module.blocks[0](torch.ones(2, 12))  # not the whole model
    handle.remove()
    found += [step(engine, number).item() for number in range(3, 5)]
    engine.destroy()
    assert all(map(math.isfinite, found))
