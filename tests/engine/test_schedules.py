"""The promise: schedules have the names, parameters, defaults and rates of DeepSpeed's, or are torch's by name."""

import math
import warnings

import pytest
import torch

from zero.optim import lr


def optimizer(*rates, kind=torch.optim.AdamW):
    """An optimizer with one parameter group per rate."""
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.8,)])


def run(kind, params, steps, *rates):
    """The first group's rate in effect at optimizer steps 0, 1, ...: the scheduler is stepped after each."""
    opt = optimizer(*rates)
    scheduler = lr.build_scheduler(opt, kind, params)
    seen = []
    for _ in range(steps):
        seen.append(opt.param_groups[0]["lr"])
        opt.step()  # torch warns of a scheduler that steps first
        scheduler.step()
    return seen


# Worked out by hand from the formulas. The first column is iteration -1, what construction writes.
LOG3 = math.log(3) / math.log(8)
COS45 = (1 + math.sqrt(0.5)) / 2
COS135 = (1 - math.sqrt(0.5)) / 2
RANGE = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2}
LINEAR = {"warmup_type": "linear"}
COSINE = {"total_num_steps": 8, "warmup_num_steps": 4, **LINEAR}
CYCLE = {"cycle_min_lr": 0, "cycle_max_lr": 1}
FLOORED = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.1, "cycle_first_step_size": 2, "decay_step_size": 2}
STAIRS = {"cycle_first_stair_count": 2, "cycle_second_stair_count": 3}
TABLES = {
    "warmup linear, up to the group's rate": (
        "WarmupLR",
        {"warmup_min_lr": 0.2, "warmup_num_steps": 4, **LINEAR},
        [0.2, 0.2, 0.35, 0.5, 0.65, 0.8, 0.8],
    ),
    "warmup log": (
        "WarmupLR",
        {"warmup_max_lr": 3.0, "warmup_num_steps": 8},
        [0, 0, 1, 3 * LOG3, 2, 3 * math.log(5) / math.log(8)],
    ),
    "0 steps, as Trainer fills in": (
        "WarmupLR",
        {"warmup_max_lr": 1.0, "warmup_num_steps": 0, **LINEAR},
        [0, 0, 0.5, 1, 1],
    ),
    "decay": (
        "WarmupDecayLR",
        {"total_num_steps": 8, "warmup_max_lr": 1.0, "warmup_num_steps": 4, **LINEAR},
        [0, 0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0],
    ),
    "cosine": (
        "WarmupCosineLR",
        {**COSINE, "cos_min_ratio": 0.0},
        [0, 0, 0.2, 0.4, 0.6, 0.8 * COS45, 0.4, 0.8 * COS135, 0, 0, 0],
    ),
    "cosine with floors": (
        "WarmupCosineLR",
        {**COSINE, "warmup_min_ratio": 0.5, "cos_min_ratio": 0.1},
        [0, 0.4, 0.5, 0.6, 0.7, 0.8 * (0.1 + 0.9 * COS45), 0.44, 0.8 * (0.1 + 0.9 * COS135), 0.08, 0.08],
    ),
    "one cycle": (
        "OneCycle",
        {**CYCLE, "cycle_first_step_size": 2, "cycle_second_step_size": 4},
        [0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0, 0],
    ),
    "one cycle with decay": (
        "OneCycle",
        {**FLOORED, "decay_lr_rate": 1},
        [0.1, 0.6, 1.1, 0.6, 0.1, 0.1 / 1.5, 0.05, 0.04],
    ),
    "one cycle in stairs, fewer on the way down": (
        "OneCycle",
        {**CYCLE, "cycle_first_step_size": 4, "cycle_second_step_size": 6, **STAIRS},
        [0, 0, 0.5, 0.5, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0],
    ),
    "range test": ("LRRangeTest", RANGE, [0.1, 0.15, 0.2, 0.25, 0.3]),
    "range test in stairs, of a 1 for true": (
        "LRRangeTest",
        {**RANGE, "lr_range_test_staircase": 1, "lr_range_test_step_rate": 2.0},
        [0.1, 0.1, 0.3, 0.3, 0.5, 0.5],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_rates_of_the_first_steps(name):
    kind, params, wanted = TABLES[name]
    assert run(kind, params, len(wanted)) == pytest.approx(wanted, abs=1e-12)


def test_defaults_are_deepspeeds():
    log1000 = math.log(1000)
    assert run("WarmupLR", {}, 3) == pytest.approx([0, 0, 0.8 * math.log(2) / log1000])
    decayed = run("WarmupDecayLR", {"total_num_steps": 2000}, 3)
    assert decayed == pytest.approx([0, 0, 0.001 * math.log(2) / log1000])
    assert run("WarmupCosineLR", {"total_num_steps": 2000}, 2001)[-1] == pytest.approx(0.8 * 0.0001)
    assert run("LRRangeTest", {}, 2) == pytest.approx([1e-3, 1e-3 * (1 + 1 / 2000)])
    assert run("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0}, 3) == pytest.approx([0, 1 / 2000, 2 / 2000])


def test_get_mom_is_the_formula_also_before_the_first_step_and_each_group_has_its_own():
    opt = optimizer(1.0, 2.0)
    scheduler = lr.OneCycle(opt, 0.1, 1.0, cycle_first_step_size=2, cycle_min_mom=[0.8, 0.6], cycle_max_mom=[0.9, 0.8])
    assert scheduler.get_mom() == [(0.9, 0.99), (0.8, 0.99)]
    assert [group["betas"] for group in opt.param_groups] == [(0.8, 0.99), (0.6, 0.99)]  # what construction writes
    scheduler.step()
    wanted = [(pytest.approx(0.85), 0.99), (pytest.approx(0.7), 0.99)]
    assert scheduler.get_mom() == [group["betas"] for group in opt.param_groups] == wanted


def test_one_cycle_says_what_has_no_effect():
    with pytest.warns(UserWarning, match="SGD has no betas"):
        scheduler = lr.OneCycle(optimizer(kind=torch.optim.SGD), 0.1, 1.0)
    assert scheduler.get_mom() is None
    scheduler.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for false in (False, 0):
            silent = lr.OneCycle(optimizer(kind=torch.optim.SGD), 0.1, 1.0, cycle_momentum=false)
            assert silent.get_mom() is None


def test_every_group_has_its_own_rate():
    opt = optimizer(1.0, 2.0)
    lr.build_scheduler(opt, "WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 4}).step(4)
    one, two = (group["lr"] for group in opt.param_groups)
    assert two == 2 * one > 0
    opt = optimizer(1.0, 2.0)
    params = {"warmup_min_lr": [0.0, 1.0], "warmup_num_steps": 2, "warmup_type": "linear"}
    scheduler = lr.build_scheduler(opt, "WarmupLR", params)
    assert [group["lr"] for group in opt.param_groups] == [0.0, 1.0]
    scheduler.step(1)
    assert scheduler.get_last_lr() == scheduler.get_lr() == [0.5, 1.5]


def test_a_schedule_that_begins_later_leaves_the_rate_alone_until_its_step():
    opt = optimizer(0.7)
    params = {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 1.0, "last_batch_iteration": 1}
    scheduler = lr.build_scheduler(opt, "WarmupLR", params)
    assert opt.param_groups[0]["lr"] == 0.7 and scheduler.get_last_lr() == [0.7]
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.5
    assert scheduler.state_dict() == {"last_batch_iteration": 2}


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    opt = optimizer(torch.tensor(0.8))
    rate = opt.param_groups[0]["lr"]
    scheduler = lr.build_scheduler(opt, "WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"})
    scheduler.step(2)
    assert opt.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.4)


def test_a_schedule_of_torch_by_name():
    assert run("StepLR", {"step_size": 2, "gamma": 0.5}, 5, 1.0) == [1, 1, 0.5, 0.5, 0.25]
    scheduler = lr.build_scheduler(optimizer(), "CosineAnnealingLR", {"T_max": 10})
    assert isinstance(scheduler, torch.optim.lr_scheduler.CosineAnnealingLR)
    opt = optimizer(torch.tensor(0.8))  # trying it on a copy changes nothing here
    assert lr.build_scheduler(opt, "ExponentialLR", {"gamma": 0.5}).last_epoch == 0
    assert opt.param_groups[0]["lr"].item() == pytest.approx(0.8) and not opt.state
    assert lr.build_scheduler(optimizer(), "ReduceLROnPlateau", {"patience": 1e1}).num_bad_epochs == 0


WRONG = [
    ("WarmupLr", {}, ["scheduler.type", "'WarmupLr'", "did you mean 'WarmupLR'?", "LRRangeTest"]),
    ("WarmupLR", {"warmup_step": 3}, ["scheduler.params.warmup_step:", "3", "did you mean 'warmup_"]),
    ("WarmupLR", {"warmup_num_steps": -1}, ["scheduler.params.warmup_num_steps:", "at least 0", "got -1"]),
    ("WarmupLR", {"warmup_num_steps": 2.5}, ["scheduler.params.warmup_num_steps:", "integer", "got 2.5"]),
    ("WarmupLR", {"warmup_max_lr": "1e-3"}, ["scheduler.params.warmup_max_lr:", "number", "'1e-3'"]),
    ("WarmupLR", {"warmup_min_lr": [0.1, 0.2]}, ["scheduler.params.warmup_min_lr:", "1", "[0.1, 0.2]"]),
    ("WarmupDecayLR", {}, ["scheduler.params.total_num_steps:", "WarmupDecayLR needs it", "none"]),
    ("OneCycle", {"cycle_min_lr": 0.1}, ["scheduler.params.cycle_max_lr:", "needs it", "cycle_min_lr"]),
    ("StepLR", {"size": 3}, ["scheduler.params.size:", "did you mean 'step_size'?"]),
    ("StepLR", {"step_size": 9, "gamma": "x"}, ["scheduler.params.gamma: wanted a number, got 'x'"]),
    ("StepLR", {"step_size": 0}, ["scheduler.params: StepLR did not accept {'step_size': 0}: ZeroDivisionError"]),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": None}, ["scheduler.params: CyclicLR", "TypeError"]),
]


@pytest.mark.parametrize(("kind", "params", "parts"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named(kind, params, parts):
    with pytest.raises(ValueError) as caught:
        lr.build_scheduler(optimizer(), kind, params)
    for part in parts:
        assert part in str(caught.value)


def test_an_unknown_warmup_type_is_the_logarithm_and_said():
    for kind, total in (("WarmupLR", None), ("WarmupDecayLR", 2000), ("WarmupCosineLR", 2000)):
        params = {"total_num_steps": total} if total else {}
        with pytest.warns(UserWarning, match="warmup_type 'exp' is unknown"):
            strange = run(kind, {**params, "warmup_type": "exp"}, 9)
        assert strange == run(kind, params, 9)


def test_a_warmup_longer_than_the_run_is_told():
    for kind in ("WarmupDecayLR", "WarmupCosineLR"):
        with pytest.warns(UserWarning, match="total_num_steps 5 is less than warmup_num_steps 1000"):
            lr.build_scheduler(optimizer(), kind, {"total_num_steps": 5})


def test_a_wrapped_optimizer_is_unwrapped():
    class Wrapper:
        optimizer = optimizer()

    for kind, params in (("WarmupLR", {}), ("StepLR", {"step_size": 1})):
        assert lr.build_scheduler(Wrapper(), kind, params).optimizer is Wrapper.optimizer


def test_one_cycle_moves_the_first_beta_against_the_rate():
    opt = optimizer()
    params = {**FLOORED, "cycle_second_step_size": 4, "decay_mom_rate": 0.1}
    scheduler = lr.build_scheduler(opt, "OneCycle", params)
    seen = []
    for _ in range(9):
        seen.append(opt.param_groups[0]["betas"])
        scheduler.step()
    first = [0.8, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9 * 1.05, 0.9 * 1.1]
    assert [beta for beta, _ in seen] == pytest.approx(first)
    assert {beta for _, beta in seen} == {0.99}
