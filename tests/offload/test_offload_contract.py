"""The promise: an engine whose state is off the device keeps every other promise, and gives the same bits.

Updates are slowed down, so that whatever does not wait for them is found out; what is compared with is the same run
without offload. Where it says so, copies are made between two memories as with a GPU.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import config, make_net, share, step
from offload_cases import BOTH, CPU, HALF, OPTIMIZER, PARAMS, as_on_a_gpu, same, slow_down
from ranks import listening
from torch import nn

import zero
from zero import utils
from zero.config import ConfigError, load

Found = list[torch.Tensor]


def params(engine: Any) -> list[nn.Parameter]:
    return list(engine.module.parameters())


def saved(engine: Any) -> Found:
    kept = io.BytesIO()
    torch.save(engine.module, kept)
    kept.seek(0)
    return [param.detach() for param in torch.load(kept, weights_only=False).parameters()]


def by_threads(engine: Any) -> Found:
    found: list[Any] = [None] * 4

    def read(index: int) -> None:
        found[index] = [param.detach().clone() for param in params(engine)]

    readers = [threading.Thread(target=read, args=(index,)) for index in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert all(same(found[0], other) for other in found)
    return found[0]


def average(engine: Any) -> Found:
    """An exponential moving average over `param.data`, on this rank only."""
    kept = engine.__dict__.setdefault("_test_average", [torch.zeros(param.shape) for param in params(engine)])
    for mean, param in zip(kept, params(engine), strict=True):
        mean.mul_(0.9).add_(param.data, alpha=0.1)
    return [mean.clone() for mean in kept]


@torch.inference_mode()
def in_inference_mode(engine: Any) -> Found:
    return [param.sum().clone() for param in params(engine)]


READS: list[Callable[[Any], Found]] = [
    lambda engine: [param.norm().detach() for param in params(engine)],
    lambda engine: [value.clone() for value in engine.module.state_dict().values()],
    lambda engine: [param.detach().clone() for param in copy.deepcopy(engine.module).parameters()],
    lambda engine: [torch.from_numpy(param.detach().numpy().copy()) for param in params(engine)],
    lambda engine: [norm.detach() for norm in torch._foreach_norm(params(engine))],
    lambda engine: [nn.utils.parameters_to_vector(params(engine)).detach()],
    lambda engine: [nn.functional.linear(torch.ones(1, 12), engine.module.head.weight).detach()],
    lambda engine: [engine.module.blocks[1](torch.ones(1, 12)).detach()],
    saved,
    by_threads,
    average,
    in_inference_mode,
]


@torch.no_grad()
def write(engine: Any) -> Found:
    engine.module.head.bias.copy_(torch.full((17,), 0.5))
    nn.init.constant_(engine.module.blocks[1].norm.weight, 0.9)
    torch._foreach_mul_(list(engine.module.blocks[0].parameters()), 0.99)
    engine.module.norm.weight.data = engine.module.norm.weight.data * 0.9
    return []


def write_all(engine: Any) -> Found:
    engine.module.load_state_dict({name: value * 0.9 for name, value in engine.module.state_dict().items()})
    return []


def state(engine: Any) -> Found:
    """Full and local access to a parameter, its state and its gradient; numbers, too."""
    param, other = params(engine)[1], params(engine)[5]
    found = [utils.safe_get_full_fp32_param(param), utils.safe_get_full_optimizer_state(other, "exp_avg")]
    found += [utils.safe_get_local_fp32_param(other), utils.safe_get_local_optimizer_state(param, "exp_avg_sq")]
    found.append(torch.tensor(utils.safe_get_full_optimizer_state(param, "step")))
    utils.safe_set_full_fp32_param(param, found[0] * 0.9)
    utils.safe_set_full_optimizer_state(other, found[1] * 0.5, "exp_avg")
    utils.safe_set_local_fp32_param(other, found[2] * 0.5)
    utils.safe_set_full_optimizer_state(param, 1, "step")
    return found


def gathered(engine: Any) -> Found:
    with zero.GatheredParameters(params(engine), modifier_rank=0):
        found = [param.detach().clone() for param in params(engine)]
        if dist.get_rank() == 0:
            with torch.no_grad():
                engine.module.head.weight.mul_(0.5)
    return found


def grads(engine: Any) -> Found:
    """Gradients are read and replaced while the update of the step before may still run."""
    engine.backward(engine(*share(50)))
    param = params(engine)[1]
    found = [utils.safe_get_full_grad(param)]
    utils.safe_set_full_grad(param, found[0] * 2)
    engine.step()
    return found


def offload(engine: Any) -> Found:
    if engine.config["zero_optimization"].get("offload_param") is None:
        engine.offload_states()
        engine.reload_states()
    return []


def evaluated(engine: Any) -> Found:
    with torch.no_grad():
        return [engine(*share(60))]


def loaded(engine: Any) -> Found:
    engine.load_module_state_dict({name: value * 0.5 for name, value in engine.module_state_dict().items()})
    return list(engine.module_state_dict().values())


COLLECTIVE = [state, gathered, grads, offload, evaluated, loaded]


def run(stage: int, places: dict[str, Any], between: Callable[[Any], Found], ranks: int, more: dict[str, Any]) -> Found:
    """Two steps, with `between` after each on the first `ranks` ranks: all that is found, and the parameters."""
    section = {"zero_optimization": {"stage": stage, **places}}
    engine, *_ = zero.initialize(model=make_net(), config=config(stage, dist.get_world_size(), **section, **more))
    slow_down(engine)
    found = []
    for number in range(2):
        found.append(step(engine, number))
        if dist.get_rank() < ranks:
            found += [value.clone() for value in between(engine)]
    found += [value.clone() for value in engine.module_state_dict().values()]
    engine.destroy()
    return found


def differing(stage: int, places: dict[str, Any], apart: bool, bf16: bool, group: str) -> list[int]:
    """Indices of what, done between steps, gives other bits than without offload."""
    cases = {"reads": READS, "reads of rank 0": READS, "writes": [write, write_all], "collectives": COLLECTIVE}[group]
    more = {"bf16": {"enabled": bf16}}
    ranks = 1 if group == "reads of rank 0" else 2
    wrong = []
    for index, between in enumerate(cases):
        plain = run(stage, {}, between, ranks, more)
        with as_on_a_gpu(apart):
            if not same(plain, run(stage, places, between, ranks, more)):
                wrong.append(index)
    return wrong


@pytest.mark.parametrize(
    ("stage", "places", "apart", "bf16", "group"),
    [
        (1, OPTIMIZER, False, False, "reads"),
        (2, HALF, True, False, "reads of rank 0"),
        (1, OPTIMIZER, True, True, "writes"),
        (3, BOTH, False, True, "collectives"),
        (3, PARAMS, True, False, "collectives"),
        *longer((2, OPTIMIZER, False, False, "writes"), (1, HALF, True, True, "collectives")),
        *longer((2, OPTIMIZER, False, True, "collectives")),
    ],
)
def test_what_happens_between_steps(pool, stage, places, apart, bf16, group):
    assert pool.run(2, differing, stage, places, apart, bf16, group) == [[], []]


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


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"stage": 0, **OPTIMIZER}, "zero_optimization.offload_optimizer.device"),
        ({"stage": 2, **PARAMS}, "zero_optimization.offload_param.device"),
        ({"stage": 0, "cpu_offload": True}, "zero_optimization.offload_optimizer.device"),
    ],
)
def test_places_that_a_stage_cannot_use_are_errors(section, path):
    with pytest.raises(ConfigError) as raised:
        load({"train_batch_size": 1, "zero_optimization": section}, 1)
    assert raised.value.errors[0].startswith(f"{path}: got 'cpu' with zero_optimization.stage")
    assert "set the stage to" in raised.value.errors[0]


def test_old_names_of_places():
    old = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False}
    found = load({"train_batch_size": 1, "zero_optimization": old, "zero_force_ds_cpu_optimizer": True}, 1)
    section = found.zero_optimization
    assert (section.offload_optimizer.device, section.offload_param.device) == (CPU["device"], CPU["device"])
