"""What the CUDA kernels' Python side does without them: errors, and one message."""

from __future__ import annotations

import functools
import logging
import math
import sys

import pytest
import torch
from kernel_cases import DTYPES, numbers

from zero.kernels import cuda, native
from zero.kernels.formulas import Lion
from zero.kernels.moments import Moment
from zero.kernels.norm import sum_squares, sum_squares_into
from zero.kernels.step import step

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_sum_squares_into_adds_up(dtype: torch.dtype) -> None:
    x, out = numbers(9000, dtype), torch.full((1, 1), 7.0, dtype=torch.float64)
    sum_squares_into(x, out)
    assert out.item() == sum_squares(x)
    sum_squares_into(x[:5], out, accumulate=True)
    assert out.item() == sum_squares(x) + sum_squares(x[:5])


def test_sum_squares_into_refuses() -> None:
    x = torch.ones(8)
    for out in (
        torch.zeros(1),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64, device="meta"),
    ):
        with pytest.raises(ValueError, match="out: got"):
            sum_squares_into(x, out)
    with pytest.raises(ValueError, match="tensor: got"):
        sum_squares_into(x[::2], torch.zeros(1, dtype=torch.float64))


def test_a_factor_that_is_no_number_on_the_device_is_refused() -> None:
    master, moments, grad = torch.ones(8), (Moment(torch.zeros(8)),), torch.ones(8)
    for factor in (
        torch.ones(2, dtype=torch.float64),
        torch.ones(1),
        torch.ones((), dtype=torch.float64, device="meta"),
    ):
        with pytest.raises(ValueError, match="grad_scale: got"):
            step(Lion(0.1), master, moments, grad, None, step=1, grad_scale=factor)
    step(Lion(0.1), master, moments, grad, None, step=1, grad_scale=torch.tensor(math.nan, dtype=torch.float64))
    assert master.eq(1).all() and moments[0].values.eq(0).all()


def test_missing_cuda_kernels_are_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "zero._cuda", None)  # makes the import fail
    for cached in (native._find, native.load):
        monkeypatch.setattr(native, cached.__name__, functools.cache(cached.__wrapped__))
    monkeypatch.setattr(cuda, "load", native.load)
    monkeypatch.setattr(cuda, "_usable", functools.cache(cuda._usable.__wrapped__))
    with caplog.at_level(logging.WARNING, logger="zero"):
        assert not cuda.kernels(CPU)
        assert not caplog.records
        for index in (0, 1, 0):
            assert not cuda.kernels(torch.device("cuda", index))
    assert [record.name for record in caplog.records] == ["zero"]
    assert "CUDA kernels are missing" in caplog.text and "ZERO_REQUIRE_CUDA=1" in caplog.text
    assert "zero._cuda" in str(native.missing_text(native.CUDA_MODULE))
