"""Packing, unpacking and row sums have the bits of their references; a sum of squares its documented order, and it
shows inf and NaN; on every instruction set.
"""

import itertools
import math

import kernel_cases
import pytest
import torch
from kernel_cases import (
    BAD_FLAT,
    CPU,
    DTYPES,
    NARROW,
    fixed_sum_squares,
    numbers,
    same,
    sizes,
)  # fmt: skip

from zero.kernels import native
from zero.kernels.bucket import pack, sum_rows, sum_rows_reference
from zero.kernels.norm import sum_squares, sum_squares_reference
from zero.kernels.wire import decode, encode

isa, threads = kernel_cases.isa, kernel_cases.threads


def every_pattern(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def ties(dtype):
    """fp32 numbers half way between neighbours of `dtype`, and the fp32 numbers next to those on both sides."""
    x = every_pattern(dtype)[every_pattern(dtype).isfinite()]
    above = (x.view(torch.int16) + 1).view(dtype)
    middle = ((x.double() + above.double()) / 2)[above.isfinite()].float()
    edge = torch.tensor([65520.0, 3.3895314e38, 3.3961775e38, 3.4028235e38, 2e-45, 2.0**-25])
    middle = torch.cat([middle, edge, -edge])
    bits = middle.view(torch.int32)
    return torch.cat([middle, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)])


@pytest.mark.parametrize("dtype", NARROW)
def test_narrowing_rounds_ties_to_even_as_torch_does(isa, dtype):
    x = torch.cat([ties(dtype), numbers(20000, hostile=True)])
    flat = torch.empty(x.numel(), dtype=dtype)
    pack([x], flat, [0])
    same(flat, x.to(dtype))
    pack(list(x[:3000].split(1)), flat, list(range(5000, 8000)))  # each element alone, in the scalar tail
    same(flat[5000:8000], x[:3000].to(dtype))


@pytest.mark.parametrize(("scale", "add"), [(1.0, False), (0.3, False), (1.0, True)])
@pytest.mark.parametrize(("dtype", "flat_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_pack_gives_the_bits_of_the_reference(isa, threads, dtype, flat_dtype, scale, add):
    kernel_cases.check_pack(dtype, flat_dtype, scale, add, torch.device("cpu"))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_rows_gives_the_bits_of_the_reference(isa, threads, dtype, accumulate):
    for numel, count, start in itertools.product(sizes(threads), (1, 2, 5), (0, 1)):
        rows = [numbers(numel, dtype, seed=row, hostile=row % 2 == 1, start=start) for row in range(count)]
        got = numbers(numel, seed=99, start=start)
        wanted = got.clone()
        sum_rows(rows, got, accumulate)
        sum_rows_reference(rows, wanted, accumulate)
        same(got, wanted)


def test_sum_rows_adds_first_to_last_and_may_write_into_a_row(isa):
    rows = [torch.full((100,), x) for x in (1.0, 1e8, -1e8)]
    sum_rows(rows, rows[0], False)
    assert rows[0].eq(0.0).all()  # (1 + 1e8) - 1e8 in fp32
    out = torch.empty(4)
    sum_rows(list(torch.arange(12.0).view(3, 4)), out, False)
    assert out.tolist() == [12, 15, 18, 21]
    sum_rows([torch.full((4,), -0.0)], out, False)
    assert out.signbit().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_8_bits_give_the_bits_of_the_reference(isa, threads, dtype):
    kernel_cases.check_messages(dtype, torch.device("cpu"))


def test_codes_of_8_blocks_come_first_and_then_their_scales(isa):
    """In each of two parts of 9 blocks: any run of whole groups is a message of its own."""
    message = encode(torch.arange(1.0, 19.0).repeat_interleave(64) * 127, parts=2)
    for part, first in ((message[:594], 1.0), (message[594:], 10.0)):
        assert part[:512].eq(127).all() and part[528:592].eq(127).all()
        scales = torch.cat([part[512:528], part[592:]]).view(torch.bfloat16)
        assert scales.tolist() == [first + block for block in range(9)]
        assert decode(part[528:].clone(), torch.empty(64)).eq((first + 8) * 127).all()


def test_8_bits_round_to_nearest_with_ties_to_even_and_show_what_is_not_finite(isa):
    values = torch.zeros(192)
    values[:6] = torch.tensor([127.0, 0.5, 1.5, -2.5, -127.0, 2.0**-149])
    values[64], values[191] = math.inf, math.nan
    message = encode(values)
    assert message.view(torch.int8)[:6].tolist() == [127, 0, 2, -2, -127, 0]
    out = decode(message, torch.empty(192))
    assert out[:6].tolist() == [127.0, 0.0, 2.0, -2.0, -127.0, 0.0]
    assert not out[6:64].any() and not out[64:].isfinite().any()
    assert decode(encode(torch.full((64,), 1e-45)), torch.ones(64)).eq(0.0).all()


@pytest.mark.parametrize("call", [sum_rows, sum_rows_reference])
def test_sum_rows_refuses(call):
    for bad in BAD_FLAT:
        with pytest.raises(ValueError, match=r"rows\[1\]: got"):
            call([torch.zeros(8), BAD_FLAT[bad]()], torch.zeros(8), False)
        with pytest.raises(ValueError, match=r"(out|rows\[0\]): got"):
            call([torch.zeros(8)], BAD_FLAT[bad](), False)
    with pytest.raises(ValueError, match="rows: got none"):
        call([], torch.zeros(8), False)
    with pytest.raises(ValueError, match=r"rows\[1\]: got.*bfloat16"):
        call([torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)], torch.zeros(8), False)


# The sum of squares.


@pytest.mark.skipif(CPU is None, reason=str(native.missing_text()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares_adds_in_the_documented_order(isa, threads, dtype):
    for numel, start in itertools.product(sizes(threads), (0, 1)):
        x = numbers(numel, dtype, start=start)
        assert sum_squares(x) == fixed_sum_squares(x)
        assert sum_squares_reference(x) == pytest.approx(sum_squares(x), rel=1e-13)


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
