"""The promise: an engine whose state is off the device keeps every other promise, and gives the same bits.

Updates are slowed down, so that whatever does not wait for them is found out; what is compared with is the same run
without offload. Where it says so, copies are made between two memories as with a GPU.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import config, make_net, share, step
from offload_cases import BOTH, HALF, OPTIMIZER, as_on_a_gpu, same, slow_down
from ranks import listening
from torch import nn

import zero

Found = list[torch.Tensor]


def trained(stage: int, places: dict[str, Any], kind: str, more: dict[str, Any]) -> Found:
    """Six micro-batches of a habit `kind`, and what came of them."""
    net, given = make_net(), {}
    if kind == "frozen and tied":
        net.blocks[1].up.requires_grad_(False)
        net.head.weight = net.embed.weight
    settings = config(stage, dist.get_world_size(), zero_optimization={"stage": stage, **places}) | more
    if kind == "groups":
        rest = [*net.embed.parameters(), *net.norm.parameters(), *net.head.parameters()]
        given["model_parameters"] = [{"params": list(net.blocks.parameters()), "lr": 0.02}, {"params": rest}]
    if kind == "client":
        given["optimizer"] = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2))
        settings.pop("optimizer")
    if kind in ("groups", "client"):
        given["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine, *_ = zero.initialize(model=net, config=settings, **given)
    slow_down(engine)
    if kind == "compiled":
        engine.compile(backend="aot_eager")
    found = []
    for number in range(6):
        found.append(HABITS.get(kind, step)(engine, number))
        if kind == "momentum begins" and number == 1:
            for group in engine.optimizer.param_groups:
                group["momentum"] = 0.9
        if kind == "batch size" and number == 1:
            engine.set_train_batch_size(2 * engine.train_batch_size())
    found += [torch.tensor([engine.skipped_steps, engine.optimizer.loss_scale, engine.get_global_grad_norm()])]
    engine.destroy()
    return [*found, *(param.detach().clone() for param in net.parameters())]


def several_backwards(engine: Any, number: int) -> torch.Tensor:
    loss = engine(*share(number))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.backward(engine(*share(number + 10)))
    engine.step()
    return loss.detach()


def coalesced(engine: Any, number: int) -> torch.Tensor:
    with engine.coalesce_grad_reduction():
        for index in (number, number + 10):
            loss = engine(*share(index))
            engine.backward(loss)
    engine.step()
    return loss.detach()


def unsynchronized(engine: Any, number: int) -> torch.Tensor:
    with engine.no_sync():
        engine.backward(engine(*share(number + 10)))
    return step(engine, number)


def some_blocks(engine: Any, number: int) -> torch.Tensor:
    """Each rank skips a block of its own."""
    net, (tokens, targets) = engine.module, share(number)
    x = net.embed(tokens)
    for index, block in enumerate(net.blocks):
        x = block(x) if (index + dist.get_rank() + number) % 3 else x
    loss = nn.functional.cross_entropy(net.head(net.norm(x)).flatten(0, 1).float(), targets.flatten())
    engine.backward(loss)
    engine.step()
    return loss.detach()


HABITS = {
    "several": several_backwards,
    "coalesced": coalesced,
    "no_sync": unsynchronized,
    "blocks skipped": some_blocks,
}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
TRAINED = [
    (1, OPTIMIZER, "frozen and tied", BF16),
    (2, OPTIMIZER, "groups", {}),
    (1, OPTIMIZER, "client", {}),
    (2, HALF, "compiled", {}),
    (3, BOTH, "compiled", BF16),
    (1, OPTIMIZER, "several", BF16),
    (3, BOTH, "several", {}),
    (2, OPTIMIZER, "coalesced", BF16),
    (1, OPTIMIZER, "no_sync", {}),
    (2, OPTIMIZER, "blocks skipped", BF16),
    (1, OPTIMIZER, "batch size", BF16),
    (1, OPTIMIZER, "momentum begins", BF16 | {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}}),
    (2, OPTIMIZER, "fp16", FP16),
    (3, BOTH, "fp16", FP16),
    (1, OPTIMIZER, "RMSprop", {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}}),
    (2, OPTIMIZER, "grad_accum_dtype", BF16 | {"data_types": {"grad_accum_dtype": "bf16"}}),
    (2, OPTIMIZER, "checks", {"zero": {"check_replicas": 2, "check_order": True}}),
    (1, OPTIMIZER, "tree", {"zero": {"reduce": "tree"}}),
]


def unlike(apart: bool, cases: list[int]) -> list[str]:
    wrong = []
    for stage, places, kind, more in (TRAINED[index] for index in cases):
        plain = trained(stage, {}, kind, more)
        with as_on_a_gpu(apart):
            if not same(plain, trained(stage, places, kind, more)):
                wrong.append(kind)
    return wrong


@pytest.mark.parametrize(("half", "apart"), [(1, True), *longer((0, False), (0, True), (1, False))])
def test_ways_to_train(pool, half, apart):
    """Compiled code, which is slow to make, between the memory of one device only."""
    cases = [index for index in range(half, len(TRAINED), 2) if not (apart and TRAINED[index][2] == "compiled")]
    assert pool.run(2, unlike, apart, cases) == [[], []]


def forked() -> str:
    """What a forked child gets to hear when it reads while the host updates."""
    engine, *_ = zero.initialize(model=make_net(), config=config(1, 1, zero_optimization={"stage": 1, **OPTIMIZER}))
    update, over = engine.optimizer.shard_optimizer.update, threading.Event()
    engine.optimizer.shard_optimizer.update = lambda *args, **kwargs: over.wait(60) and update(*args, **kwargs)
    step(engine, 0)
    here, there = os.pipe()
    if os.fork() == 0:
        try:
            engine.module.head.bias.sum()
            os.write(there, b"read")
        except RuntimeError as error:
            os.write(there, str(error).encode())
        os._exit(0)
    os.wait()
    over.set()
    said = os.read(here, 1000).decode()
    engine.module.head.bias.sum()
    engine.destroy()
    return said


def test_a_forked_child_is_told_instead_of_waiting_for_ever(pool):
    assert "before the fork" in pool.run(1, forked)[0]


@pytest.mark.ranks(1)
def test_the_breakdowns_tell_of_the_host():
    more = {"wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 2}
    section = {"zero_optimization": {"stage": 1, **OPTIMIZER}}
    with listening(logging.INFO) as said:
        engine, *_ = zero.initialize(model=make_net(), config=config(1, 1, **section) | more)
        slow_down(engine)
        for number in range(4):
            step(engine, number)
    assert engine.state_nbytes().optimizer == 0, "what rests on the host must not count as the device's"
    assert engine.host_nbytes().moments > 0
    engine.destroy()
    assert any(" (waiting for updates " in text for text in said)
    assert any("off the device on rank 0 (MiB) | masters: " in text for text in said)


@pytest.mark.ranks(2)
def test_check_runs_with_state_in_host_memory():
    section = {"zero_optimization": {"stage": 3, **BOTH}}
    engine, *_ = zero.initialize(model=make_net(blocks=1), config=config(3, dist.get_world_size(), **section))
    report = engine.check(share(0), steps=2, stages=(0, 3), accumulations=(1,), offload=True)
    engine.destroy()
    good, text = bool(report), str(report)
    assert good, text
    for places in ("optimizer on cpu", "half the optimizer on cpu", "parameters on cpu"):
        assert f"stage 3, {places}, accumulation 1" in text


def test_states_that_are_away_already_are_refused():
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 1, zero_optimization={"stage": 3, **BOTH}))
    with pytest.raises(RuntimeError, match=r"zero_optimization\.offload_param"):
        engine.offload_states()
    engine.destroy()
