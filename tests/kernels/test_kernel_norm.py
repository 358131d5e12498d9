"""The sum of squares: its documented order of additions, on every instruction set, and that it shows inf and NaN."""

import itertools
import math

import kernel_cases
import pytest
import torch
from kernel_cases import BAD_ANY_SHAPE, BAD_FLAT, CPU, DTYPES, fixed_sum_squares, numbers, sizes

from zero.kernels import native
from zero.kernels.norm import sum_squares, sum_squares_reference

isa, threads = kernel_cases.isa, kernel_cases.threads


@pytest.mark.skipif(CPU is None, reason=str(native.missing_text()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares_adds_in_the_documented_order(isa, threads, dtype):
    for numel, start in itertools.product(sizes(threads), (0, 1)):
        x = numbers(numel, dtype, start=start)
        assert sum_squares(x) == fixed_sum_squares(x)
        assert sum_squares_reference(x) == pytest.approx(sum_squares(x), rel=1e-13)


@pytest.mark.skipif(CPU is None, reason=str(native.missing_text()))
def test_more_blocks_than_lanes_are_added_in_the_documented_order(threads):
    x = torch.randn(1027 * 4096 + 5)
    assert sum_squares(x) == fixed_sum_squares(x)


@pytest.mark.parametrize("numel", [1, 17, 4097, 33013])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares_is_finite_exactly_when_all_elements_are(isa, threads, dtype, numel):
    x = torch.full((numel,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isfinite(sum_squares(x))
    for at, bad in itertools.product({0, numel // 2, numel - 1}, (math.inf, -math.inf, math.nan)):
        y = x.clone()
        y[at] = bad
        assert not math.isfinite(sum_squares(y))
        assert not math.isfinite(sum_squares_reference(y))


def test_sum_squares_takes_any_shape_fp64_and_subnormals(isa):
    assert sum_squares(torch.full((3, 5), 2.0)) == 60.0
    assert sum_squares(torch.full((3, 5), 2.0, dtype=torch.float64)) == 60.0
    assert sum_squares(torch.tensor([2.0**-149])) == 2.0**-298


@pytest.mark.parametrize("bad", BAD_ANY_SHAPE)
@pytest.mark.parametrize("call", [sum_squares, sum_squares_reference])
def test_sum_squares_refuses(call, bad):
    with pytest.raises(ValueError, match="tensor: got"):
        call(BAD_FLAT[bad]())
