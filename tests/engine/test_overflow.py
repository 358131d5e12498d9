"""The promise: a gradient that is not finite skips the step on all ranks alike and is named, with its micro-step.

`Armed` is a linear layer whose weight gets an infinite gradient in the forwards that were told so; nothing else does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import each_once, longer
from models import batch, config, make_net, share
from torch import nn

import zero

STAGES = (0, 1, 2, 3)


class Infinite(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("inf")


class Armed(nn.Linear):
    """A linear layer; see the module's docstring."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, Infinite.apply(self.weight) if self.armed else self.weight, self.bias)


def make() -> tuple[nn.Module, list[Armed]]:
    """A Net with an armed layer in each of its first two blocks: `blocks.0.down` and `blocks.1.down`."""
    net = make_net()
    for block in list(net.blocks)[:2]:
        armed = Armed(block.down.in_features, block.down.out_features)
        armed.load_state_dict(block.down.state_dict())
        block.down = armed
    return net, [net.blocks[0].down, net.blocks[1].down]


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """What the engine warns of."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("zero").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("zero").removeHandler(handler)


Arms = dict[int, tuple[int, int]]  # by micro-step: which rank arms which layer


def skipped(stage: int, mode: dict[str, Any], accumulation: int, arms: Arms) -> tuple[list[str], tuple[Any, ...], bool]:
    """One window with armed layers, and a clean one: warnings, counters after each, whether only the second moved."""
    net, layers = make()
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
    settings = config(stage, dist.get_world_size(), accumulation=accumulation, scheduler=schedule, **mode)
    engine, optimizer, _, scheduler = zero.initialize(model=net, config=settings)
    values = [[], [], []]
    counters: list[Any] = []
    with listening() as said:
        for window in range(3):
            with zero.GatheredParameters(net.parameters()):
                values[window] = [param.detach().float().clone() for param in net.parameters()]
            for micro in range(accumulation if window < 2 else 0):
                rank, layer = arms.get(micro, (-1, 0)) if window == 0 else (-1, 0)
                layers[layer].armed = rank == dist.get_rank()
                engine.backward(engine(*share(micro)))
                layers[layer].armed = False
                engine.step()
            counters.append((engine.was_step_applied(), optimizer.overflow, engine.skipped_steps, engine.global_steps))
            counters.append((scheduler.last_batch_iteration, optimizer.cur_scale))
    moved = [any(not torch.equal(a, b) for a, b in zip(values[w], values[w + 1], strict=True)) for w in (0, 1)]
    return said, tuple(counters[:4]), moved == [False, True]


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}}
CASES: dict[str, tuple[dict[str, Any], int, Arms, str]] = {
    # mode, accumulation, arms, and what is said of it
    "fp16": (FP16, 3, {1: (1, 1)}, "'blocks.1.down.weight' is not finite (micro-step 2 of 3); loss scale 4096 -> 2048"),
    "bf16": ({"bf16": {"enabled": True}}, 3, {0: (1, 0)}, "'blocks.0.down.weight' is not finite (micro-step 1 of 3)"),
    "fp32 at the boundary": ({}, 3, {2: (0, 1)}, "'blocks.1.down.weight' is not finite (micro-step 3 of 3)"),
    "no accumulation": ({}, 1, {0: (1, 1)}, "'blocks.1.down.weight' is not finite (micro-step 1 of 1)"),
    # The one that came first, though at the step both are there, and in the model the other stands before it.
    "the earlier of two": ({}, 3, {0: (1, 1), 1: (0, 0)}, "'blocks.1.down.weight' is not finite (micro-step 1 of 3)"),
    "autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"loss_scale": 64}},
        2,
        {1: (0, 0)},
        "'blocks.0.down.weight' is not finite (micro-step 2 of 2); loss scale 64 is fixed",
    ),
}


@pytest.mark.parametrize(("stage", "case"), each_once(STAGES, list(CASES)))
def test_one_rank_overflows_and_all_skip(pool, stage, case):
    mode, accumulation, arms, text = CASES[case]
    before = 4096.0 if case == "fp16" else 64.0 if case == "autocast" else 1.0
    after = 2048.0 if case == "fp16" else before
    ranks = pool.run(2, skipped, stage, mode, accumulation, arms)
    for rank, (said, counters, only_the_second_moved) in enumerate(ranks):
        assert counters == ((False, True, 1, 1), (-1, after), (True, False, 1, 2), (0, after))
        assert only_the_second_moved
        assert said == ([f"step skipped: the gradient of parameter {text}"] if rank == 0 else [])


def two_backwards(stage: int) -> list[str]:
    """Three backwards in one micro-step, of which the second overflows."""
    net, layers = make()
    engine = zero.initialize(model=net, config=config(stage, 2))[0]
    with listening() as said:
        for number in range(3):
            layers[0].armed = number == 1
            engine.backward(engine(*share(number)))
        engine.step()
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_backwards_count_not_micro_batches(pool, stage):
    text = "step skipped: the gradient of parameter 'blocks.0.down.weight' is not finite (micro-step 2 of 3)"
    assert pool.run(2, two_backwards, stage) == [[text], []]


def used_scales(stage: int, overflows: str) -> tuple[list[float], list[str]]:
    net, layers = make()
    rule = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
    engine, optimizer, *_ = zero.initialize(model=net, config=config(stage, 2, fp16=rule))
    scales = [optimizer.loss_scale]
    with listening() as said:
        for step, mark in enumerate(overflows):
            layers[step % 2].armed = mark == "x" and dist.get_rank() == step % 2
            loss = engine(*share(step))
            layers[step % 2].armed = False
            engine.backward(loss)
            engine.step()
            scales.append(optimizer.loss_scale)
    return scales, [line.partition("; ")[2] for line in said]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_scale_follows_the_overflows_of_the_model(pool, stage):
    scales, said = pool.run(2, used_scales, stage, "x...xx")[0]
    assert scales == [256, 256, 256, 256, 512, 512, 256]
    assert said == [
        "loss scale 256 stays, hysteresis 2 -> 1",
        "loss scale 512 stays, hysteresis 2 -> 1",
        "loss scale 512 -> 256",
    ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_at_the_minimum_every_rank_says_so(stage):
    net, layers = make()
    rule = {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 4, "hysteresis": 1}
    engine, *_ = zero.initialize(model=net, config=config(stage, 2, fp16=rule))
    layers[1].armed = dist.get_rank() == 1
    engine.backward(engine(*share(0)))
    layers[1].armed = False
    try:
        engine.step()
        text = "nothing was raised"
    except RuntimeError as error:
        text = str(error)
    gone = engine.state_nbytes().gradients == 0 or stage == 0  # stage 0 keeps the memory
    applied = []
    for step in range(2):  # the engine is usable still
        engine.backward(engine(*share(step)))
        engine.step()
        applied.append(engine.was_step_applied())
    assert text == (
        "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run. With loss scale 4, "
        "the gradient of parameter 'blocks.1.down.weight' is not finite (micro-step 1 of 1)."
    )
    assert gone
    assert applied == [True, True]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_is_checked_unless_told_not_to(stage, check):
    net, layers = make()
    settings = config(stage, 1, bf16={"enabled": True, "check_grad_overflow": check})
    engine = zero.initialize(model=net, config=settings)[0]
    layers[0].armed = True
    engine.backward(engine(*batch(0, 2)))
    engine.step()
    assert (engine.was_step_applied(), engine.optimizer.overflow) == (not check, check)
    assert layers[0].weight.isfinite().all() == check


def test_the_loss_scale_as_the_optimizer_shows_it():
    engine, optimizer, *_ = zero.initialize(model=make()[0], config=config(0, 1, fp16={"enabled": True}))
    assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.dynamic_loss_scale) == (65536.0, 65536.0, True)
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (0.0, True)
    assert optimizer.loss_scaler.loss_scale == 65536.0
    optimizer.override_loss_scale(256)
    loss = engine(*batch(0, 2))
    assert engine.scale(loss).item() == 256 * loss.item()
    for twice in (engine.scale, engine.backward):
        with pytest.raises(
            ValueError, match=r"got a loss that engine.scale\(\) has multiplied by the loss scale already"
        ):
            twice(engine.scale(loss))
    returned = engine.backward(loss)
    assert returned.item() == loss.item(), "what is returned is for logging: no scale in it"
    with pytest.raises(RuntimeError, match=r"override_loss_scale\(\): gradients are there"):
        optimizer.override_loss_scale(1)
    engine.step()
    assert (optimizer.cur_scale, optimizer.dynamic_loss_scale) == (256.0, False)
    assert optimizer._global_grad_norm == engine.get_global_grad_norm()
    fixed = zero.initialize(model=make()[0], config=config(0, 1, fp16={"enabled": True, "loss_scale": 128}))[0]
    assert (fixed.loss_scale(), fixed.dynamic_loss_scale(), fixed.optimizer.cur_scale) == (128.0, False, 128.0)
    plain = zero.initialize(model=make()[0], config=config(0, 1))[0]
    assert (plain.loss_scale(), plain.dynamic_loss_scale(), plain.optimizer.cur_scale) == (1.0, False, 1.0)
    loss = plain(*batch(0, 2))
    assert plain.scale(loss) is loss
    with pytest.raises(ValueError, match=r"scale\(\) wants the loss, a scalar tensor with a graph; got float"):
        plain.scale(1.0)


@pytest.mark.ranks(2)
def test_a_model_without_optimizer_is_not_watched():
    """A frozen model that is only differentiated through, cut between uses, more than once."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).requires_grad_(False)
    settings = {key: value for key, value in config(3, 2).items() if key != "optimizer"}
    engine = zero.initialize(model=net, config=settings)[0]
    results = []
    for _ in range(3):
        x = torch.full((2, 4), float("inf")).requires_grad_()
        engine(x).sum().backward()
        results.append(x.grad is not None)
    assert results == [True] * 3


def test_an_exception_in_a_scaled_backward_is_forgotten():
    """The next backward, which nobody scaled, is not taken for a scaled one."""
    fp16 = {"enabled": True, "initial_scale_power": 10}
    norms = []
    for fails in (False, True):
        net, _ = make()
        engine = zero.initialize(model=net, config=config(0, 1, fp16=fp16))[0]
        if fails:
            loss = engine(*batch(0, 2))
            with pytest.raises(ZeroDivisionError):
                engine.scale(loss + Failing.apply(loss)).backward()
        engine(*batch(1, 2)).backward()
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]


class Failing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 // 0)
