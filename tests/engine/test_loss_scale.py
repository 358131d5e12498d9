"""The promise: the loss scale moves as DeepSpeed's does, step for step, and a growth acts from the next step on."""

from __future__ import annotations

import pytest

from zero.config.sections import Fp16
from zero.optim.scaler import LARGEST, LossScaler


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
