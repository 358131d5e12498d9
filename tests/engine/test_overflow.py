"""The promise: a gradient that is not finite skips the step on all ranks alike and is named, with its micro-step.

`Armed` is a linear layer whose weight gets an infinite gradient in the forwards that were told so; nothing else does.
The loss scale moves as DeepSpeed's does, step for step, and a growth acts from the next step on.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import each_once, longer
from models import config, make_net, share
from ranks import listening, said_by
from scenario import run
from torch import nn

import zero
from zero.config.sections import Fp16
from zero.optim.scaler import LARGEST, LossScaler

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


def make() -> nn.Module:
    """A Net with an armed layer in each of its first two blocks: `blocks.0.down` and `blocks.1.down`."""
    net = make_net()
    for block in list(net.blocks)[:2]:
        armed = Armed(block.down.in_features, block.down.out_features)
        armed.load_state_dict(block.down.state_dict())
        block.down = armed
    return net


def start(stage: int, world: int, **more: Any) -> Any:
    return zero.initialize(model=make(), config=config(stage, world, **more))[0]


def backward(engine: Any, number: int, block: int | None = None) -> torch.Tensor:
    """Forward and backward, with the layer of a block armed."""
    if block is not None:
        engine.module.blocks[block].down.armed = True
    loss = engine(*share(number))
    for one in engine.module.blocks[:2]:
        one.down.armed = False
    engine.backward(loss)
    return loss


Arms = dict[int, tuple[int, int]]  # by micro-step: which rank arms which layer


def skipped(stage: int, mode: dict[str, Any], accumulation: int, arms: Arms) -> tuple[list[str], list[Any], list[bool]]:
    """A window with armed layers, and a clean one: warnings, counters after each, and whether weights moved."""
    weights = []  # before each micro-step, and at the end

    def keep(engine: Any) -> None:
        with zero.GatheredParameters(engine.parameters()):
            weights.append([param.detach().clone() for param in engine.parameters()])

    def loop(engine: Any, number: int, inputs: Any) -> torch.Tensor:
        keep(engine)
        rank, block = arms.get(number, (-1, 0))
        return backward(engine, number, block if rank == dist.get_rank() else None)

    def watch(engine: Any, number: int) -> tuple[Any, ...]:
        at = engine.lr_scheduler.last_batch_iteration, engine.optimizer.cur_scale
        return engine.was_step_applied(), engine.optimizer.overflow, engine.skipped_steps, engine.global_steps, *at

    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
    json = {"stage": stage, "accumulation": accumulation, "scheduler": schedule, **mode}
    with listening() as said:
        seen = run(make, json, 2, loop=loop, watch=watch, keep=keep).seen[accumulation - 1 : -1 : accumulation]
    moved = [not all(map(torch.equal, *pair)) for pair in itertools.pairwise(weights[::accumulation])]
    return said, seen, moved


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
    for rank, (said, counters, moved) in enumerate(pool.run(2, skipped, stage, mode, accumulation, arms)):
        assert counters == [(False, True, 1, 1, -1, after), (True, False, 1, 2, 0, after)]
        assert moved == [False, True]
        assert said == ([f"step skipped: the gradient of parameter {text}"] if rank == 0 else [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_at_the_minimum_every_rank_says_so(stage):
    rule = {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 4, "hysteresis": 1}
    engine = start(stage, 2, fp16=rule)
    backward(engine, 0, 1 if dist.get_rank() == 1 else None)
    assert said_by(engine.step) == (
        "RuntimeError: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run. With loss "
        "scale 4, the gradient of parameter 'blocks.1.down.weight' is not finite (micro-step 1 of 1)."
    )
    assert engine.state_nbytes().gradients == 0 or stage == 0  # stage 0 keeps the memory
    for number in range(2):  # the engine is usable still
        backward(engine, number)
        engine.step()
        assert engine.was_step_applied()


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_is_checked_unless_told_not_to(stage, check):
    engine = start(stage, 1, bf16={"enabled": True, "check_grad_overflow": check})
    backward(engine, 0, 0)
    engine.step()
    assert (engine.was_step_applied(), engine.optimizer.overflow) == (not check, check)
    assert engine.module.blocks[0].down.weight.isfinite().all() == check


def test_the_loss_scale_as_the_optimizer_shows_it():
    engine = start(0, 1, fp16={"enabled": True})
    optimizer = engine.optimizer
    assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.dynamic_loss_scale) == (65536.0, 65536.0, True)
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (0.0, True)
    assert optimizer.loss_scaler.loss_scale == 65536.0
    optimizer.override_loss_scale(256)
    loss = engine(*share(0))
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
    fixed = start(0, 1, fp16={"enabled": True, "loss_scale": 128})
    assert (fixed.loss_scale(), fixed.dynamic_loss_scale(), fixed.optimizer.cur_scale) == (128.0, False, 128.0)
    plain = start(0, 1)
    assert (plain.loss_scale(), plain.dynamic_loss_scale(), plain.optimizer.cur_scale) == (1.0, False, 1.0)
    loss = plain(*share(0))
    assert plain.scale(loss) is loss
    with pytest.raises(ValueError, match=r"scale\(\) wants the loss, a scalar tensor with a graph; got float"):
        plain.scale(1.0)


def test_an_exception_in_a_scaled_backward_is_forgotten():
    """The next backward, which nobody scaled, is not taken for a scaled one."""
    norms = []
    for fails in (False, True):
        engine = start(0, 1, fp16={"enabled": True, "initial_scale_power": 10})
        if fails:
            loss = engine(*share(0))
            failing = loss.clone()
            failing.register_hook(lambda grad: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                engine.scale(loss + failing).backward()
        engine(*share(1)).backward()
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]


# --- how the scale moves ---------------------------------------------------------------------------------------------


def dynamic(power: int, window: int, hysteresis: int, consecutive: bool = False, lowest: int = 1) -> Fp16:
    return Fp16(
        initial_scale_power=power,
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_loss_scale=lowest,
    )


def scales(rule: Fp16, overflows: str) -> list[float]:
    """The scale that each step used, and the one after the last; `x` is an overflow, `.` a good step."""
    scaler = LossScaler(rule=rule)
    used = [scaler.loss_scale]
    for mark in overflows:
        scaler.update(mark == "x")
        used.append(scaler.loss_scale)
    return used


# One line per case: the overflows, and the powers of two of the scale before each step and after the last.
@pytest.mark.parametrize(
    ("rule", "overflows", "powers"),
    [
        # Window 2 from the start: growth comes after window + 1 good steps, then after every window.
        (dynamic(8, 2, 1), "......", [8, 8, 8, 9, 9, 10, 10]),
        # No hysteresis: every overflow halves.
        (dynamic(8, 2, 1), "xxx", [8, 7, 6, 5]),
        # After an overflow at step 2 the first growth comes after window + 1 good steps... counted from that one.
        (dynamic(8, 2, 1), "..x...", [8, 8, 8, 7, 7, 7, 8]),
        (dynamic(8, 1, 1), "x....", [8, 7, 7, 8, 9, 10]),
        # Hysteresis 2: the first overflow is forgiven, all others are not, until growth.
        (dynamic(8, 3, 2), "x.x.x", [8, 8, 8, 7, 7, 6]),
        (dynamic(8, 2, 2), "x...xx", [8, 8, 8, 8, 9, 9, 8]),
        # consecutive: any good step forgives anew, so only overflows in a row halve.
        (dynamic(8, 100, 2, True), "x.x.xx.xxx", [8, 8, 8, 8, 8, 8, 7, 7, 7, 6, 5]),
        (dynamic(8, 100, 3, False), "xx.xx", [8, 8, 8, 8, 7, 6]),
        # The minimum holds, even where it is no power of two times the start.
        (dynamic(3, 100, 1, False, 4), "x", [3, 2]),
    ],
)
def test_sequences(rule, overflows, powers):
    assert scales(rule, overflows) == [2.0**power for power in powers]


def test_the_minimum_comes_after_hysteresis_and_is_said():
    scaler = LossScaler(rule=dynamic(3, 100, 2, lowest=3))
    for said in ("loss scale 8 stays, hysteresis 2 -> 1", "loss scale 8 -> 4", "loss scale 4 -> 3"):
        assert scaler.update(True) == said
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^Current loss scale already at minimum - cannot decrease scale any"):
            scaler.update(True)
        assert scaler.loss_scale == 3.0


def test_growth_ends_before_numbers_do():
    scaler = LossScaler(rule=dynamic(60, 1, 1))
    for _ in range(20):
        scaler.update(False)
    assert scaler.loss_scale == LARGEST
    assert scaler.update(True) == f"loss scale {2**64} -> {2**63}"


def test_a_forced_scale_stays():
    scaler, again = LossScaler(rule=dynamic(4, 1, 1)), LossScaler(rule=Fp16())
    scaler.force(1024)
    for overflow in (True, False, False, False):
        scaler.update(overflow)
    assert (scaler.loss_scale, scaler.dynamic) == (1024.0, False)
    again.load_state_dict(scaler.state_dict())
    assert again.loss_scale == 1024.0


def test_what_is_no_scale_and_no_state_is_refused():
    for scale in (0, -1.0, float("inf"), float("nan"), True, "8"):
        with pytest.raises(ValueError, match=r"override_loss_scale\(\): got .*, wanted a positive finite number"):
            LossScaler(8.0).force(scale)
    with pytest.raises(ValueError, match=r"state of the loss scaler: got the keys \['cur_scale'\], wanted \["):
        LossScaler(rule=Fp16()).load_state_dict({"cur_scale": 1})


def test_a_fixed_scale_never_moves_and_deepspeeds_names_say_where_it_is():
    scaler, moving = LossScaler(128.0), LossScaler(rule=dynamic(8, 2, 1))
    assert [scaler.update(overflow) for overflow in (True, False)] == ["loss scale 128 is fixed", ""]
    assert (scaler.loss_scale, scaler.cur_scale, scaler.dynamic) == (128.0, 128.0, False)
    assert (scaler.cur_iter, scaler.scale_window) == (0, None)
    scaler.load_state_dict(LossScaler(rule=Fp16()).state_dict())
    assert scaler.loss_scale == 128.0, "the configuration fixes it"
    assert LossScaler().update(True) == ""
    for _ in range(4):
        moving.update(False)
    assert (moving.cur_scale, moving.cur_iter, moving.scale_window) == (512.0, 4, 2)
