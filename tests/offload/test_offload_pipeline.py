"""The promise: with the optimizer on the host, transfers and updates run beside the training loop, in an order.

Gradients are in host memory before their backward has ended, the norm is known before the first update, updates come in
order of the forward with the hyperparameters of their step, and the next forward waits for one unit at a time. Updates
are held up by events here, never by time: what would wait for too much waits for itself, and a guard gives it up.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from alive import Alive, alive, only_new
from marks import longer
from models import batch, config, make_net

import zero
from zero.memory.available import host_threads

HOST = {"offload_optimizer": {"device": "cpu"}}
GUARD = 20  # seconds until a thread that waits for too much is let go, and the test fails


def settings_of(stage: int, accumulation: int = 1, clipping: float = 0.0, offload: bool = True) -> dict[str, Any]:
    # Nothing is gathered ahead: what is wanted before its use is waited for before its use.
    section = {"stage": stage, "stage3_prefetch_bucket_size": 0, **(HOST if offload else {})}
    more = {"gradient_clipping": clipping, "zero_optimization": section}
    return config(stage, dist.get_world_size(), accumulation=accumulation, **more)


def engine_of(*args: Any, **kwargs: Any) -> Any:
    return zero.initialize(model=make_net(), config=settings_of(*args, **kwargs))[0]


def micro_step(engine: Any, step: int) -> float:
    tokens, targets = batch(step, 2)
    loss = engine(tokens, targets)
    engine.backward(loss)
    engine.step()
    return loss.item()


def names_of(engine: Any) -> list[str]:
    return [unit.plan.name for unit in engine._sharded.trained]


def overlaps(stage: int) -> tuple[list[float], bool]:
    """Losses, and whether a forward began while the last unit's update was held up until it did."""
    engine = engine_of(stage)
    begun, in_time, last = threading.Event(), [], names_of(engine)[-1]

    def held_up(what: str, unit: str) -> None:
        if (what, unit) == ("update", last):
            in_time.append(begun.wait(GUARD))

    engine.optimizer._updater.on_update = held_up
    losses = [micro_step(engine, 0)]
    # Behind our own hook, that waits for what the module reads.
    engine.module.blocks[0].norm.register_forward_pre_hook(lambda module, args: begun.set())
    losses.append(micro_step(engine, 1))
    engine.optimizer.settle()
    engine.destroy()
    return losses, in_time[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_next_forward_begins_before_the_last_update(pool, stage):
    got = pool.run(2, overlaps, stage)
    wanted = pool.run(2, plain_losses, stage)
    assert [losses for losses, _ in got] == wanted
    assert all(in_time for _, in_time in got), "the first blocks waited for the update of the last one"


def plain_losses(stage: int) -> list[float]:
    engine = engine_of(stage, offload=False)
    losses = [micro_step(engine, step) for step in range(2)]
    engine.destroy()
    return losses


def later_rate(offload: bool) -> dict[str, torch.Tensor]:
    """Parameters after two steps; the rate is changed right after the first one, whose updates wait for that."""
    engine, changed = engine_of(2, offload=offload), threading.Event()
    if offload:
        engine.optimizer._updater.on_update = lambda what, unit: changed.wait(GUARD)
    micro_step(engine, 0)
    engine.optimizer.param_groups[0]["lr"] = 0.5
    changed.set()
    micro_step(engine, 1)
    engine.destroy()
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def test_hyperparameters_are_those_of_the_step(pool):
    for got, wanted in zip(pool.run(2, later_rate, True), pool.run(2, later_rate, False), strict=True):
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def steady(stage: int, accumulation: int, steps: int) -> tuple[tuple[Alive, int], tuple[Alive, int], list[int]]:
    """What is alive, and bytes taken from the arena, after three steps and after all; where the sums rest, by step."""
    with only_new():
        engine, addresses, counted = engine_of(stage, accumulation, 0.5), [], []
        for step in range(steps):
            for micro in range(accumulation):
                tokens, targets = batch(step * accumulation + micro, 2)
                engine.backward(engine(tokens, targets))
                addresses.append([unit.gradients.shard.data_ptr() for unit in engine._sharded.trained][-1])
                engine.step()
            if step in (2, steps - 1):
                engine.optimizer.settle()
                counted.append((alive(), engine._sharded.offload._arena._taken))
        engine.destroy()
    return (*counted, addresses)


@pytest.mark.parametrize(("stage", "accumulation"), [(2, 2), *longer((2, 1), (3, 1))])
def test_nothing_is_allocated_in_steady_state(pool, stage, accumulation):
    for (early, taken), (late, taken_late), addresses in pool.run(2, steady, stage, accumulation, 20):
        assert taken == taken_late > 0
        assert late.tensors == early.tensors and late.nbytes == early.nbytes
        assert len(set(addresses)) == 1, "sums add up where they rest"


def told_threads() -> tuple[int, int, int]:
    engine = engine_of(2)
    found = engine.optimizer.host_threads
    engine.destroy()
    return found, host_threads(), torch.get_num_threads()


def test_threads_are_the_cores_of_the_rank_whatever_the_launcher_set(pool, monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for threads in ("", "1", "7"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert host_threads() == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert host_threads() == max(1, cores // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert host_threads() == 1
    # Workers of the pool let torch have one thread, as OMP_NUM_THREADS=1 does.
    for engines, wanted, torchs in pool.run(2, told_threads):
        assert torchs == 1 and engines == wanted


def read_after_steps(settled: bool, **more: Any) -> list[torch.Tensor]:
    """What parameters that stay whole say right after each step, and after the last update."""
    section = {"stage": 3, "stage3_param_persistence_threshold": 10**6, **more}
    engine = zero.initialize(model=make_net(), config=config(3, 2, zero_optimization=section))[0]
    found = []
    for step in range(2):
        micro_step(engine, step)
        if settled:
            engine.optimizer.settle()
        found += [param.detach().clone() for param in reversed(list(engine.parameters()))]
    engine.destroy()
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settled", [False, True])
def test_who_reads_what_stays_whole_waits_for_its_update(settled):
    assert all(map(torch.equal, read_after_steps(settled, **HOST), read_after_steps(settled)))
