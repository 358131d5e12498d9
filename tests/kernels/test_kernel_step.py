"""The compiled step gives the bits of its reference; a remainder those of an fp32 master; a cut shard those of a whole.

One reference run on an fp32 master serves all kinds of masters: what a parameter copy or a remainder must be follows
from the fp32 master.
"""

import functools
import itertools

import kernel_cases
import pytest
import torch
from kernel_cases import (
    DTYPES,
    FORMULAS,
    KINDS,
    MASTERS,
    Shard,
    check_marks,
    numbers,
    same,
    shard,
    step_reference,
)
from marks import each_once

from zero.kernels.formulas import Adagrad, Adam, Lion, Sgd
from zero.kernels.moments import FORMATS, Moment
from zero.kernels.remainder import join, round_bf16, split
from zero.kernels.step import step

isa, threads = kernel_cases.isa, kernel_cases.threads

SIZES = (0, 1, 7, 8, 15, 16, 17, 255, 256, 257, 1023, 1025)
COUNTERS = {"step": 7, "grad_scale": 0.37, "key": 5, "first": 512}
every_kind = pytest.mark.parametrize(("name", "fmt"), KINDS, ids=["-".join(kind) for kind in KINDS])
each_kind_once = pytest.mark.parametrize(("isa", "form"), each_once(kernel_cases.ISAS, KINDS), indirect=["isa"])


@functools.cache
def wanted(name, fmt, grad_dtype, numel, hostile):
    made = shard(FORMULAS[name], fmt, None, grad_dtype, numel, hostile)
    step_reference(FORMULAS[name], *made, **COUNTERS)
    return made


def same_moments(got, wanted, what):
    same(got.values, wanted.values, what)
    if wanted.scales is not None:
        same(got.scales, wanted.scales, f"{what} scales")


def compare(got, wanted, kind, what=""):
    """`got` has master and parameter of this kind; `wanted` has an fp32 master that they must stand for."""
    if kind == "remainder":
        same(join(got.param, got.master), wanted.master, f"{what} master")
        param, low = split(wanted.master)
        number = ~wanted.master.isnan()  # whose payload is not promised
        same(got.param, param, f"{what} param")
        assert torch.equal(got.master[number], low[number])
    else:
        same(got.master, wanted.master, f"{what} master")
        if kind is not None:
            copy = round_bf16(wanted.master) if kind is torch.bfloat16 else wanted.master.to(kind)
            same(got.param, copy, f"{what} param")
    for index, (a, b) in enumerate(zip(got.moments, wanted.moments, strict=True)):
        same_moments(a, b, f"{what} state {index}")


def check(name, fmt, kind, grad_dtype, numel, hostile, start):
    got = shard(FORMULAS[name], fmt, kind, grad_dtype, numel, hostile, start)
    grad = got.grad.clone()
    step(FORMULAS[name], *got, **COUNTERS)
    what = f"{name}, {fmt}, {kind}, {grad_dtype}, {numel}, hostile={hostile}, start={start}:"
    same(got.grad, grad, what)
    compare(got, wanted(name, fmt, grad_dtype, numel, hostile), kind, what)


@every_kind
def test_step_gives_the_bits_of_the_reference(isa, name, fmt):
    for kind, grad_dtype in itertools.product(MASTERS, DTYPES):
        check(name, fmt, kind, grad_dtype, 300, False, 0)
        check(name, fmt, kind, grad_dtype, 1025, True, 1)


@each_kind_once
def test_marks_are_those_of_what_changes(isa, form):
    name, fmt = form
    for kind, numel in itertools.product(MASTERS, (0, 13, 300, 2049, 33013)):
        made = shard(FORMULAS[name], fmt, kind, torch.bfloat16, numel, start=1)
        check_marks(FORMULAS[name], made.copy(torch.clone), made, (name, fmt, kind, numel))


@each_kind_once
def test_all_sizes_give_the_bits_of_the_reference(isa, form):
    name, fmt = form
    for index, (numel, start, hostile) in enumerate(itertools.product(SIZES, (0, 1), (False, True))):
        for kind in (MASTERS[1 + index % 3], "remainder"):
            check(name, fmt, kind, DTYPES[(index + numel) % 3], numel, hostile, start)


@each_kind_once
def test_threads_do_not_change_the_bits(isa, threads, form):
    name, fmt = form
    for kind, grad_dtype in ((torch.float16, torch.bfloat16), ("remainder", torch.float32)):
        check(name, fmt, kind, grad_dtype, 33013, True, 1)


@pytest.mark.parametrize(("name", "fmt"), [("AdamW", "8bit"), ("AdamW", "fp32"), ("Lion", "bf16"), ("Adagrad", "8bit")])
def test_a_large_shard_gives_the_bits_of_the_reference(isa, name, fmt, monkeypatch):
    monkeypatch.setattr("zero.kernels.step.REFERENCE_CHUNK", 1 << 18)
    check(name, fmt, "remainder", torch.bfloat16, (1 << 20) + 3, False, 1)


CHANGES = [
    *(Adam(1e-3, **change) for change in (
        {"decoupled": False}, {"beta1": 0.0}, {"beta1": 0.5}, {"beta1": 0.3, "beta2": 0.0}, {"bias_correction": False},
        {"eps": 0.0, "weight_decay": 3.0}, {"beta1": 1 - 1e-12, "beta2": 1 - 1e-15},
    )),
    Adam(0.0), Lion(0.0), Lion(1.0, 0.0, 0.0), Lion(1e-3, 0.0, 0.5, 0.1), Sgd(0.0), Sgd(1.0, 1.0, 1.0), Sgd(0.1, 2.0),
    Sgd(0.1, 0.5, weight_decay=0.5, nesterov=True), Adagrad(0.0), Adagrad(1.0, 0.5, 0.0), Adagrad(1e30, eps=1e-50),
]  # fmt: skip


@pytest.mark.parametrize("formula", CHANGES, ids=str)
def test_hyperparameters(isa, formula):
    for fmt, count, scale in itertools.product(FORMATS, (1, 2, 10**9), (1.0, -1e-3)):
        runs = []
        for take in (step, step_reference):
            name = next(name for name, other in FORMULAS.items() if other.state_names == formula.state_names)
            runs.append(shard(FORMULAS[name], fmt, torch.bfloat16, torch.float32, 515, True))
            take(formula, *runs[-1], step=count, grad_scale=scale, key=2**62 + 1, first=2**40)
        compare(*runs, torch.bfloat16, f"{formula}, {fmt}, step {count}:")


def special(numel):
    """Numbers at which rounding to bf16 is peculiar, then normal ones."""
    of_bf16 = "0 1 7fff 8000 8001 ffff 7fffff 800000 3f808000 3f818000 7f7f8000 7f800000"
    patterns = [int(pattern, 16) for pattern in of_bf16.split()]
    patterns += [pattern - 2**31 for pattern in patterns]
    made = numbers(numel, seed=1)
    made[: len(patterns)] = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    return made


def run(take, name, fmt, kind, steps, numel=1000):
    """Training from `special` on random gradients; every 100th parameter is kept beside the last state."""
    formula, kept = FORMULAS[name], []
    param, low = split(special(numel))
    master = low if kind == "remainder" else special(numel)
    moments = tuple(Moment.filled(numel, fmt, signed=signed) for signed in formula.signed)
    grads = [numbers(numel, torch.bfloat16, seed=10 + index) for index in range(7)]
    for index in range(1, steps + 1):
        take(formula, master, moments, grads[index % 7], param, step=index, grad_scale=1 / (index % 11 + 1), key=3)
        if index % 100 == 0:
            kept.append(param.clone())
    return Shard(master, moments, grads[0], param), kept


@functools.cache
def reference_run(name, fmt):
    return run(step_reference, name, fmt, torch.bfloat16, 100)


@each_kind_once
def test_remainder_trains_as_an_fp32_master_over_1000_steps(isa, form):
    name, fmt = form
    (full, kept), (joined, kept_joined) = (run(step, name, fmt, kind, 1000) for kind in (torch.bfloat16, "remainder"))
    compare(joined, full, "remainder", f"{name}, {fmt}:")
    compare(full, full, torch.bfloat16)
    for a, b in zip(kept, kept_joined, strict=True):
        same(a, b)
    same(kept[0], reference_run(name, fmt)[1][0])


def cut(made, begin, end):
    moments = tuple(m.narrow(begin, end - begin) for m in made.moments)
    return Shard(
        made.master[begin:end], moments, made.grad[begin:end], None if made.param is None else made.param[begin:end]
    )


@each_kind_once
def test_a_cut_shard_gives_the_bits_of_the_whole(isa, threads, form):
    """Of the compiled step and, on one thread, of the reference."""
    for take in (step, step_reference) if threads == 1 else (step,):
        check_cut(take, *form)


def check_cut(take, name, fmt):
    whole, pieces = (shard(FORMULAS[name], fmt, "remainder", torch.bfloat16, 33013, hostile=True) for _ in range(2))
    take(FORMULAS[name], *whole, **COUNTERS)
    for begin, end in itertools.pairwise((0, 256, 1024, 1280, 20480, 33013)):
        take(FORMULAS[name], *cut(pieces, begin, end), **COUNTERS | {"first": COUNTERS["first"] + begin})
    compare(pieces, whole._replace(master=join(whole.param, whole.master)), "remainder")


@pytest.mark.parametrize("fmt", ["bf16", "8bit"])
@pytest.mark.parametrize("change", [{"step": 8}, {"key": 6}, {"first": 256}])
def test_step_key_and_place_choose_the_random_bits(isa, change, fmt):
    codes = []
    for counters in (COUNTERS, COUNTERS, COUNTERS | change):
        made = shard(FORMULAS["Lion"], fmt, None, torch.float32, 2048)
        step(FORMULAS["Lion"], *made, **counters)
        codes.append(kernel_cases.bits(made.moments[0].values))
    assert torch.equal(codes[0], codes[1])
    assert 0.2 < (codes[0] != codes[2]).double().mean() < 0.6
