"""The promise: a step has the host wait for nothing of the device, and comes to the numbers of one that waits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nccl import on_fake_nccl
from marks import longer
from models import WIDE, config, make_net, share, step
from offload_cases import GPU
from stand_in_device import StandIn

import zero

STEPS, ACCUMULATION = 7, 2
READ = "synchronize in optim/outcome.py, numbers"  # of what has been sent to the host
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # Overflows at the start, until the scale fits, and grows again, too far.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 1, "hysteresis": 1}},
}


# Matrices one by one: what is done at once has 16 bits on a device only.
BY_MUON = {"lr": 0.01, "ns_method": "standard", "zero": {"moments": "8bit"}}
# Four units: of more, host and device add up the norm in orders of their own.
UNITS = {"unit_norms": 1, "units": ["blocks.0"]}
MUON = {"optimizer": {"type": "Muon", "params": BY_MUON}, "zero": UNITS}
NORMUON = {"optimizer": {"type": "Muon", "params": {**BY_MUON, "beta2": 0.9}}, "zero": UNITS}


class Sink:
    """Takes what the monitors are told of each step, but for times and bytes."""

    def __init__(self) -> None:
        self.got: list[tuple[str, float, int]] = []

    def write_events(self, event_list: Any) -> None:
        names = ("train_loss", "lr", "loss_scale", "grad_norm")
        kept = [each for each in event_list if each[0].endswith(names) or "/Units/" in each[0]]
        self.got += [(name, repr(value), samples) for name, value, samples in kept]  # repr: a NaN equals no other


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    """Inside, this process has a device, and ranks talk over NCCL."""
    several = dist.is_initialized()
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch, hosts=True) if several else StandIn() as device:
        yield device


def settings(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}
    common = {"gradient_clipping": 0.5, "scheduler": schedule, "accumulation": ACCUMULATION, "zero": {"unit_norms": 1}}
    common["communication_data_type"] = "fp32"  # NCCL adds in what travels, our sum over gloo in fp32
    return config(stage, world, **(common | PRECISIONS[precision] | more))


def run(given: dict[str, Any], device: StandIn | None, bad: int = 4, rank: int = 0) -> dict[str, Any]:
    """Train, with a gradient of inf in step `bad` of a rank; what came of it. No step may wait for a `device`."""
    engine, optimizer, _, scheduler = zero.initialize(model=make_net(width=WIDE), config=given)
    sink, losses, read = Sink(), [], 0
    engine.monitor.add(sink)
    for number in range(STEPS * ACCUMULATION):
        if device is not None:
            device.waited.clear()
        loss = engine(*share(number))
        spoils = number == bad * ACCUMULATION and engine.global_rank == rank
        engine.backward(loss * math.inf if spoils else loss)
        engine.step()
        losses.append(loss.detach().clone())
        if device is not None:
            assert {*device.waited} <= {READ}, (number, device.waited)
            read += len(device.waited)
            done, left = divmod(number + 1, ACCUMULATION)
            assert read == (done if left else max(0, done - 1)), "an outcome was read in its own step"
    after = [engine.was_step_applied(), engine.skipped_steps, optimizer.overflow, repr(engine.get_global_grad_norm())]
    steps = zero.utils.safe_get_full_optimizer_state(next(engine.module.parameters()), "step")
    rates = [*scheduler.get_last_lr(), engine.global_steps, optimizer.loss_scale]
    engine.destroy()
    parameters = [param.detach().clone() for param in engine.module.parameters()]
    return {"losses": losses, "told": sink.got, "after": (after, float(steps), rates), "parameters": parameters}


def compare(given: dict[str, Any], plain: dict[str, Any] | None = None) -> None:
    """`plain`: what comes to the same numbers, where the host has none of what `given` needs."""
    rank = 1 if dist.is_initialized() else 0
    here = run(plain or given, None, rank=rank)
    with stand_in() as device:
        there = run(given, device, rank=rank)
    assert here["after"][0][1] > 0, "no step was skipped"
    assert there["told"] == here["told"]
    assert there["after"] == here["after"]
    for kind in ("losses", "parameters"):
        assert all(map(torch.equal, there[kind], here[kind])), kind


@pytest.mark.parametrize(
    ("stage", "precision", "rule"),
    [(1, "bf16", {}), (2, "fp16", MUON), *longer((0, "fp32", {}), (3, "bf16", {}))],
)
def test_one_rank(stage, precision, rule):
    compare(settings(stage, precision, **rule))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "rule"), [(2, {}), *longer((1, {}), (3, MUON))])
def test_state_that_streams(stage, rule):
    streamed = settings(stage, "fp16", zero_optimization={"stage": stage, "offload_optimizer": GPU}, **rule)
    compare(streamed, settings(stage, "fp16", **rule))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "precision", "rule"),
    [
        (3, "fp16", {}),
        *longer((0, "bf16", {}), (1, "fp32", {}), (3, "bf16", MUON), (2, "fp16", NORMUON)),
    ],
)
def test_two_ranks(stage, precision, rule):
    compare(settings(stage, precision, **rule))


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"alarm": {"norm": 3.0, "action": "skip"}}, "an outcome was read in its own step"),
        *longer(({"reduce": "tree"}, "in optim/norm.py, exact_norm")),
    ],
)
def test_where_the_host_decides_it_reads_at_once(section, where):
    """So the counter counts. The numbers are those of a CPU all the same."""
    given = settings(1, "bf16", zero=section)
    with stand_in() as device, pytest.raises(AssertionError, match=where):
        run(given, device)
    with stand_in():
        there = run(given, None)
    here = run(given, None)
    assert there["after"] == here["after"] and all(map(torch.equal, there["parameters"], here["parameters"]))


@contextlib.contextmanager
def started(stage: int, **more: Any) -> Iterator[tuple[Any, StandIn]]:
    """An engine on that device."""
    with stand_in() as device:
        engine, *_ = zero.initialize(model=make_net(), config=settings(stage, "fp32", accumulation=1, **more))
        yield engine, device
        engine.destroy()


def test_the_smallest_loss_scale_is_an_error_of_the_next_backward():
    smallest = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}
    with started(0, fp16=smallest) as (engine, _):
        engine.backward(engine(*share(0)) * math.inf)
        engine.step()
        loss = engine(*share(1))
        with pytest.raises(RuntimeError, match=r"already at minimum.*a gradient in unit '<root>' is not finite"):
            engine.backward(loss)


@pytest.mark.ranks(2)
def test_a_step_launches_kernels_for_units_and_not_for_parameters():
    with started(0, zero={}) as (engine, device):
        step(engine, 0)
        assert 0 < device.launches < len(list(engine.module.parameters()))


def test_a_skipped_step_is_said_later_by_its_unit(caplog):
    with started(0) as (engine, _):
        loss = engine(*share(0))
        engine.backward(loss + engine.module.blocks[1].up.bias[0] * math.inf)
        engine.step()
        assert "skipped" not in caplog.text
        assert not engine.was_step_applied() and engine.optimizer.overflow
        assert "step skipped: a gradient in unit 'blocks.1' is not finite" in caplog.text
