"""The promise: an update in host memory that fails is named, ends all ranks at once, and leaves a plain module.

Nor do threads outlive their engine, and a process that ends while updates run neither hangs nor takes along what
others still read.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from models import config, make_net
from offload_cases import BOTH, OPTIMIZER, as_on_a_gpu, mine, one_step
from torch import nn

import zero

ROOT = Path(__file__).parent.parent


def fail_at_second(engine: Any) -> None:
    update, calls = engine.optimizer.rule.update, []

    def second_raises(*args: Any, **kwargs: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        update(*args, **kwargs)

    engine.optimizer.rule.update = second_raises


def said_by(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def failing(stage: int, places: dict[str, Any], ranks: tuple[int, ...], apart: bool) -> dict[str, Any]:
    """A step that fails on some ranks in its second update, and what the engine says from then on."""
    net = make_net(blocks=2)
    with as_on_a_gpu(apart):
        section = {"zero_optimization": {"stage": stage, **places}}
        engine, *_ = zero.initialize(model=net, config=config(stage, dist.get_world_size(), **section))
    one_step(engine, 0)
    engine.optimizer.settle()
    if dist.get_rank() in ranks:
        fail_at_second(engine)
    first = next(filter(lambda text: text != "nothing", (said_by(one_step, engine, number) for number in range(1, 4))))
    later = [said_by(engine, *mine(2)), said_by(engine.step)]
    if dist.get_rank() in ranks and stage < 3:
        later.append(said_by(lambda: [param.sum() for param in net.parameters()]))
    engine.destroy()
    plain = all(type(param) is nn.Parameter and not hasattr(param, "_zero_owner") for param in net.parameters())
    loss = net(*mine(2))
    loss.backward()
    return {"first": first, "later": later, "plain": plain, "loss": loss.item()}


CASES = [
    (1, OPTIMIZER, (0, 1), False),
    (2, OPTIMIZER, (1,), True),
    (3, OPTIMIZER, (1,), False),
    (3, BOTH, (0, 1), True),
]


@pytest.mark.parametrize(("stage", "places", "ranks", "apart"), CASES)
def test_an_update_that_fails_is_named_everywhere(pool, stage, places, ranks, apart):
    texts = [
        f"the update of unit 'blocks.0' failed on rank {rank} with OSError: [Errno 28] No space left on device"
        for rank in ranks
    ]
    for rank, found in enumerate(pool.run(2, failing, stage, places, ranks, apart)):
        # Where both fail, one may hear of the other's failure first.
        assert all(any(text in said for text in texts) for said in [found["first"], *found["later"]])
        assert found["plain"]
        if rank in ranks:
            assert "half updated" in found["later"][0]
            assert "Call destroy()" in found["later"][0]
        if stage < 3:
            assert math.isfinite(found["loss"])


def updaters() -> int:
    return sum(thread.name.startswith("zero-updates") for thread in threading.enumerate())


def threads(stage: int) -> list[int]:
    def settled(wanted: int) -> int:
        end = time.monotonic() + 10
        while updaters() != wanted and time.monotonic() < end:
            time.sleep(0.02)
        return updaters()

    section = {"zero_optimization": {"stage": stage, **OPTIMIZER}}
    engines = [zero.initialize(model=make_net(), config=config(stage, 2, **section))[0] for _ in range(2)]
    found = [updaters()]
    for number in range(3):
        for engine in engines:
            one_step(engine, number)
    found.append(updaters())
    engines.pop().destroy()
    found.append(settled(1))
    engine = None
    engines.clear()
    gc.collect()
    found.append(settled(0))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_each_engine_has_one_thread_which_ends_with_it(pool, stage):
    assert pool.run(2, threads, stage) == [[0, 2, 1, 0]] * 2


PROGRAM = """
import signal, sys, time, torch, torch.distributed as dist, zero
from models import batch, config, make_net

how, world = sys.argv[1], int(sys.argv[2])
section = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
engine, *_ = zero.initialize(model=make_net(), config=config(1, world, zero_optimization=section))
rank, update = engine.global_rank, engine.optimizer.rule.update

def slow(*args, **kwargs):
    time.sleep(0.3)
    update(*args, **kwargs)

engine.optimizer.rule.update = slow
tokens, targets = (part[2 * rank : 2 * rank + 2] for part in batch(0, 2 * world))
engine.backward(engine(tokens, targets))
engine.step()
if how == "interrupt":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
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


def command(tmp_path: Path, how: str, world: int) -> tuple[list[str], dict[str, str]]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run = [sys.executable, "-m", "zero", "run", "--num_gpus", str(world)] if world > 1 else [sys.executable]
    return [*run, str(program), how, str(world)], os.environ | {"PYTHONPATH": path}


@pytest.mark.parametrize(
    ("how", "world", "status", "said"),
    [("read", 2, 0, "read True"), ("raise", 1, 1, "ArithmeticError: of the user")],
)
def test_a_program_may_end_while_updates_run(tmp_path, how, world, status, said):
    """With two ranks: one reads parameters that another has still to send when its program ends."""
    run, environment = command(tmp_path, how, world)
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert said in ended.stdout + ended.stderr
    assert "half updated" not in ended.stdout + ended.stderr


def test_ctrl_c_while_a_forward_waits_for_an_update(tmp_path):
    run, environment = command(tmp_path, "interrupt", 1)
    process = subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "stepped\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    assert said.strip().endswith("KeyboardInterrupt")
