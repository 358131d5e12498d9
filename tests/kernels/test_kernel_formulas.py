"""The formulas are those of torch.optim and of Lion's paper, and their numbers are checked."""

import functools
import math

import kernel_cases
import pytest
import torch
from closeness import allowed, error
from kernel_cases import numbers, same, step_reference

from zero.kernels.formulas import Adagrad, Adam, Lion, Sgd
from zero.kernels.moments import Moment
from zero.kernels.remainder import round_bf16
from zero.kernels.step import step

isa = kernel_cases.isa

STEPS = 60
CASES = {
    "AdamW": (Adam(1e-3, 0.9, 0.99, 1e-8, 0.1), torch.optim.AdamW, {"betas": (0.9, 0.99), "weight_decay": 0.1}),
    "AdamW, low betas": (Adam(1e-3, 0.4, 0.5, 1e-6), torch.optim.AdamW,
                         {"betas": (0.4, 0.5), "eps": 1e-6, "weight_decay": 0.0}),
    "Adam": (Adam(1e-3, 0.9, 0.99, 1e-8, 0.1, decoupled=False), torch.optim.Adam,
             {"betas": (0.9, 0.99), "weight_decay": 0.1}),
    "SGD": (Sgd(1e-2, weight_decay=0.1), torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD, momentum": (Sgd(1e-2, 0.9), torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "SGD, dampening": (Sgd(1e-2, 0.9, 0.3, 0.1), torch.optim.SGD,
                       {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "SGD, nesterov": (Sgd(1e-2, 0.9, 0.0, 0.1, True), torch.optim.SGD,
                      {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": (Adagrad(1e-2), torch.optim.Adagrad, {"lr": 1e-2}),
    "Adagrad, decay": (Adagrad(1e-2, 0.1, 1e-8, 0.1), torch.optim.Adagrad,
                       {"lr": 1e-2, "lr_decay": 0.1, "eps": 1e-8, "weight_decay": 0.1}),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES)


@functools.cache
def problem():
    return numbers(1009, seed=5), [numbers(1009, seed=10 + index) * 0.1 for index in range(STEPS)]


def run_torch(case, dtype, **options):
    start, grads = problem()
    _, kind, fixed = CASES[case]
    parameter = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = kind([parameter], **fixed, **options)
    for grad in grads:
        parameter.grad = grad.to(dtype)
        optimizer.step()
    return parameter.detach()


def run_ours(take, formula, dtype):
    start, grads = problem()
    master, param = start.to(dtype, copy=True), torch.zeros(1009, dtype=torch.bfloat16)
    moments = tuple(Moment(torch.zeros_like(master)) for _ in formula.state_names)
    for index, grad in enumerate(grads, 1):
        take(formula, master, moments, grad * 4, param, step=index, grad_scale=0.25)
    same(param, round_bf16(master.float()))
    return master


@functools.cache
def torch_fp64(case):
    return run_torch(case, torch.float64)


@pytest.mark.parametrize("take", [step, step_reference])
@every_case
def test_in_fp64_it_is_the_formula_of_torch(case, take, monkeypatch):
    monkeypatch.setattr("zero.kernels.step.REFERENCE_CHUNK", 512)
    ours = run_ours(take, CASES[case][0], torch.float64)
    torch.testing.assert_close(ours, torch_fp64(case), rtol=1e-12, atol=1e-14)


@every_case
def test_in_fp32_it_is_as_near_to_fp64_as_torch_is(isa, case):
    ours, exact = run_ours(step, CASES[case][0], torch.float32), torch_fp64(case)
    for options in ({"fused": True}, {"foreach": False}):
        peer = run_torch(case, torch.float32, **options)
        assert (ours - exact).abs().mean() <= 2 * (peer - exact).abs().mean()
        assert error([ours], [exact]) <= allowed([exact], [peer])


def test_lion_is_that_of_the_paper():
    start, grads = problem()
    formula, p, m = Lion(1e-3, 0.9, 0.98, 0.1), start.double(), torch.zeros(1009, dtype=torch.float64)
    for grad in grads:
        update = torch.sign(0.9 * m + (1 - 0.9) * grad.double())
        p = p - 1e-3 * (update + 0.1 * p)
        m = 0.98 * m + (1 - 0.98) * grad.double()
    torch.testing.assert_close(run_ours(step, formula, torch.float64), p, rtol=1e-12, atol=1e-14)


BAD = [
    (Adam, {"lr": math.nan}, "lr: got nan"), (Adam, {"eps": -1.0}, "eps: got -1"), (Adam, {"lr": math.inf}, "lr: got"),
    (Adam, {"beta1": 1.0}, r"beta1: got 1.0; wanted a number in \[0, 1\)"), (Lion, {"beta2": -0.1}, "beta2: got -0.1"),
    (Lion, {"weight_decay": -1.0}, "weight_decay: got"), (Sgd, {"momentum": -0.1}, "momentum: got -0.1"),
    (Sgd, {"momentum": 0.9, "dampening": 1.5}, r"dampening: got 1.5; wanted a number in \[0, 1\]"),
    (Sgd, {"nesterov": True}, "nesterov: got momentum 0.0 and dampening 0.0"),
    (Adagrad, {"lr_decay": -1.0}, "lr_decay: got"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "message"), BAD, ids=[message.split(":")[0] for _, _, message in BAD])
def test_hyperparameters_out_of_range_are_refused(kind, change, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"lr": 1e-3} | change)
