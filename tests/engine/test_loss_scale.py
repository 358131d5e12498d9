"""The promise: the loss scale moves as DeepSpeed's does, step for step, and a growth acts from the next step on."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.config.sections import Fp16
from zero.optim.scaler import AT_MINIMUM, LARGEST, LossScaler


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


def restated(rule: Fp16, overflows: list[bool]) -> list[float | None]:
    """The sequence from the whole history at every step, with no state carried along; None once it has failed."""
    found: list[float | None] = [2.0**rule.initial_scale_power]
    grew: set[int] = set()  # steps after which the scale doubled
    for now in range(len(overflows)):
        scale = found[-1]
        if scale is None:
            found.append(None)
            continue
        before = overflows[:now]
        good = now - max((step for step in range(now) if before[step]), default=-1) - 1
        if overflows[now]:
            refills = [at for at in range(now) if at in grew or (rule.consecutive_hysteresis and not before[at])]
            since = before[refills[-1] + 1 :] if refills else before
            if sum(since) >= rule.hysteresis - 1:
                scale = None if scale == rule.min_loss_scale else max(scale / 2, rule.min_loss_scale)
        elif good > 0 and good % rule.loss_scale_window == 0:
            grew.add(now)
            scale *= 2
        found.append(scale)
    return found


rules = st.builds(
    Fp16,
    initial_scale_power=st.integers(2, 12),
    loss_scale_window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
    min_loss_scale=st.integers(1, 4),
)


@settings(max_examples=500, deadline=None)
@given(rule=rules, overflows=st.lists(st.booleans(), max_size=40))
def test_any_sequence_is_what_the_history_says(rule, overflows):
    scaler, wanted = LossScaler(rule=rule), restated(rule, overflows)
    for step, overflow in enumerate(overflows):
        assert scaler.loss_scale == wanted[step]
        if wanted[step + 1] is None:
            with pytest.raises(RuntimeError, match=AT_MINIMUM):
                scaler.update(overflow)
            return
        said = scaler.update(overflow)
        assert bool(said) == (overflow or wanted[step + 1] != wanted[step])
    assert scaler.loss_scale == wanted[-1]


@settings(max_examples=200, deadline=None)
@given(rule=rules, overflows=st.lists(st.booleans(), max_size=30), cut=st.integers(0, 30))
def test_a_saved_scaler_goes_on_as_if_never_stopped(rule, overflows, cut):
    one, other = LossScaler(rule=rule), LossScaler(rule=rule)
    with contextlib.suppress(RuntimeError):  # at the minimum
        for overflow in overflows[:cut]:
            one.update(overflow)
        other.load_state_dict(one.state_dict())
        for overflow in overflows[cut:]:
            assert one.loss_scale == other.loss_scale
            assert one.update(overflow) == other.update(overflow)
        assert one.state_dict() == other.state_dict()


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
