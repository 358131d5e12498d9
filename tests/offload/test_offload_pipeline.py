"""The promise: with the optimizer on the host, updates run beside the training loop, in constant memory.

Updates are held up by events here, never by time: what would wait for too much waits for itself, and a guard gives up.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from alive import alive, only_new
from marks import longer
from models import config, make_net, step
from offload_cases import OPTIMIZER
from scenario import differences, run

import zero
from zero.memory.available import host_threads

pytestmark = pytest.mark.ranks(2)
GUARD = 20  # seconds until a thread that waits for too much is let go, and the test fails


def engine_of(stage: int, **more: Any) -> Any:
    # Nothing is gathered ahead: what is wanted before its use is waited for before its use.
    section = {"stage": stage, "stage3_prefetch_bucket_size": 0, **OPTIMIZER}
    return zero.initialize(model=make_net(), config=config(stage, 2, zero_optimization=section, **more))[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_next_forward_begins_before_the_last_update(stage: int) -> None:
    """The last unit's update is held up until a forward begins."""
    engine, begun, in_time = engine_of(stage), threading.Event(), []
    last = engine.describe().units[-1].name

    def held_up(what: str, unit: str) -> None:
        if (what, unit) == ("update", last):
            in_time.append(begun.wait(GUARD))

    engine.optimizer._updater.on_update = held_up
    step(engine, 0)
    # Behind our own hook, that waits for what the module reads.
    engine.module.blocks[0].norm.register_forward_pre_hook(lambda module, args: begun.set())
    step(engine, 1)
    engine.optimizer.settle()
    engine.destroy()
    assert in_time[0], "the first blocks waited for the update of the last one"


@pytest.mark.parametrize(("stage", "accumulation"), [(2, 2), *longer((2, 1), (3, 1))])
def test_nothing_is_allocated_in_steady_state(stage: int, accumulation: int) -> None:
    """What is alive, objects and threads, after three steps and after many."""
    with only_new():
        engine, found = engine_of(stage, accumulation=accumulation, gradient_clipping=0.5), []
        for number in range(20 * accumulation):
            step(engine, number % 7)
            if number + 1 in (3 * accumulation, 20 * accumulation):
                engine.optimizer.settle()
                now = alive()
                found.append((now.tensors, now.nbytes, now.ours, threading.active_count()))
        engine.destroy()
    changed = {kind for kind in found[0][2] | found[1][2] if found[0][2].get(kind) != found[1][2].get(kind)}
    assert found[0] == found[1], changed


def test_who_reads_what_stays_whole_waits_for_its_update() -> None:
    """Right after each step."""
    json = {"stage": 3, "section": {"stage3_param_persistence_threshold": 10**6}}

    def read(engine: Any, number: int) -> list[Any]:
        return [param.tolist() for param in reversed(list(engine.parameters()))]

    plain = run("net", json, watch=read)
    found = run("net", {**json, "section": {**json["section"], **OPTIMIZER}}, watch=read)
    assert not differences(found, plain, "losses", "norms", "weights", "seen")


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
    for ranks, wanted in ("2", max(1, cores // 2)), ("1000", 1):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert host_threads() == wanted
    # Workers of the pool let torch have one thread, as OMP_NUM_THREADS=1 does.
    for engines, wanted, torchs in pool.run(2, told_threads):
        assert torchs == 1 and engines == wanted
