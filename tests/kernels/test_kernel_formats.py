"""Masters in 16 + 16 bits are exact for every pattern; bf16 and 8-bit moments are unbiased, repeatable and near."""

import kernel_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import bits, numbers

from zero.kernels.formulas import Lion
from zero.kernels.moments import BLOCK, FORMATS, Moment, blocks_of, random_bits
from zero.kernels.remainder import join, round_bf16, split
from zero.kernels.step import step

isa = kernel_cases.isa

LOWS = torch.arange(1 << 16, dtype=torch.int64)
# Upper halves: zero, subnormal, around the smallest normal, around 1 (odd and even), around the largest, inf, NaN.
_HIGHS = "0 1 40 7e 7f 80 81 3f7f 3f80 3f81 4049 7f00 7f7e 7f7f 7f80 7f81 7fff"
HIGHS = [int(pattern, 16) for pattern in _HIGHS.split()]
SIGNED = pytest.mark.parametrize("signed", [True, False])


def floats(patterns):
    return (patterns - ((patterns >> 31) << 32)).to(torch.int32).view(torch.float32)


def sweep():
    """All lower halves of each upper one of both signs."""
    for high in HIGHS:
        for sign in (0, 0x8000):
            yield floats(((high | sign) << 16) + LOWS)


def test_split_and_join_are_exact_for_every_lower_half():
    for x in sweep():
        param, low = split(x)
        assert (param.dtype, low.dtype) == (torch.bfloat16, torch.int16)
        back, nan = join(param, low), x.isnan()
        assert torch.equal(bits(back)[~nan], bits(x)[~nan])
        assert (bits(back)[nan] == 0x7FC00000).all()
        assert torch.equal(bits(param), bits(round_bf16(x)))


def test_the_parameter_is_the_nearest_bf16_with_ties_away_from_zero():
    for x in sweep():
        x = x[x.isfinite()].double()
        param, even = round_bf16(x.float()), x.float().bfloat16()
        tie = bits(x.float()) & 0xFFFF == 0x8000
        assert torch.equal(bits(param)[~tie], bits(even)[~tie])
        finite = tie & param.isfinite()
        assert (param.double().abs() > x.abs())[finite].all()
        assert torch.equal((param.double() - x).abs()[finite], (even.double() - x).abs()[finite])


def test_a_parameter_written_from_outside_is_its_own_master():
    param = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    master, nan = join(param, torch.zeros(1 << 16, dtype=torch.int16)), param.isnan()
    assert torch.equal(master[~nan], param.float()[~nan]) and master[nan].isnan().all()


def test_the_compiled_step_splits_and_joins_every_pattern_as_the_reference(isa):
    for x in sweep():
        param, low = split(x)
        still = Lion(0.0)
        step(still, low, (Moment.filled(1 << 16, "fp32"),), torch.zeros(1 << 16), param, step=1, grad_scale=1.0)
        nan = x.isnan()
        assert torch.equal(bits(join(param, low))[~nan], bits(x)[~nan])
        assert (bits(param)[nan] == 0x7FC0).all() and (low[nan] == 0).all()


# Moments.


def rounded(x, fmt, signed, seed):
    moment = Moment.filled(x.numel(), fmt)
    moment.write(x, signed, random_bits(x.numel(), key=0, step=seed, first=0) & 0xFFFF)
    return moment


@SIGNED
@pytest.mark.parametrize("fmt", ["bf16", "8bit"])
def test_stochastic_rounding_is_unbiased_and_repeatable(fmt, signed):
    x = numbers(4096)
    x = x if signed else x.square()
    top = x.abs().view(-1, BLOCK).amax(1).repeat_interleave(BLOCK)
    x = torch.where(x.abs() < top * 2**-12, top * 2**-12, x)  # inside the codes' range: what is below has a bias
    assert torch.equal(*(bits(rounded(x, fmt, signed, 5).values) for _ in range(2)))
    draws = 400
    mean = sum(rounded(x, fmt, signed, seed).decode(signed).double() for seed in range(1, draws + 1)) / draws
    width = 2.0 ** (torch.frexp(x)[1].double() - (8 if fmt == "bf16" else 4))  # of a code at x
    error = (mean - x.double()) / width
    assert error.abs().max() < 6 * 0.5 / draws**0.5
    assert error.mean().abs() < 6 * 0.5 / (draws * x.numel()) ** 0.5


def magnitudes(smallest, largest):
    value = st.floats(smallest, largest, width=32, allow_subnormal=False)
    return st.lists(value, min_size=1, max_size=600)


def encoded(values, signed, seed):
    """(x, what comes back, its distance from x, the block's largest magnitude for each element)"""
    x = torch.tensor(values, dtype=torch.float32)
    moment = Moment.filled(x.numel(), "8bit")
    moment.write(x, signed, None if seed is None else random_bits(x.numel(), key=seed, step=1, first=0) >> 16)
    back = moment.decode(signed)
    top = torch.cat([block.abs().amax().expand(len(block)) for block in x.split(BLOCK)])
    return x, back, (back.double() - x.double()).abs(), top


@given(magnitudes(-(2.0**100), 2.0**100), st.none() | st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_8bit_with_signs_is_near_and_keeps_signs(values, seed):
    x, back, error, top = encoded(values, True, seed)
    allowed = (x.abs() * 2**-3).maximum(top * 2**-13.0)  # a code's width; below 2^-15 of the scale it may become zero
    big = top > 2.0**-100  # elsewhere the smallest code is a subnormal
    assert (error <= allowed * (0.5 if seed is None else 1.0) + top * 2.0**-13)[big].all()
    assert ((back == 0) | (back.signbit() == x.signbit())).all()
    assert (back[x == 0] == 0).all()


@given(magnitudes(0.0, 2.0**100), st.none() | st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_8bit_without_signs_is_near_and_never_makes_a_zero(values, seed):
    x, back, error, top = encoded(values, False, seed)
    big = top > 2.0**-60
    allowed = x * 2**-3 * (0.5 if seed is None else 1.0)
    assert (error <= allowed.maximum(top * 2.0**-29))[big].all()
    assert ((back > 0) == (x > 0))[big].all()


@SIGNED
def test_8bit_keeps_every_code(signed):
    codes = torch.arange(256, dtype=torch.uint8)
    codes[128] = 0 if signed else codes[128]  # -0 is no code
    for scale in (2.0**-90, 1.0, 2.0**100):
        moment = Moment(codes.clone(), torch.tensor([scale]))
        values = moment.decode(signed)
        assert values.isfinite().all() and values.abs().max() == 1.875 * scale
        moment.write(values, signed)  # 1.875 rounds up to the next power of two
        assert moment.scales.item() == 2 * scale
        values[values.abs() > 1.75 * scale] = 0.0
        for seed in (1, 2):
            moment.write(values, signed, random_bits(256, key=0, step=seed, first=0) >> 16)
            assert moment.scales.item() == scale and torch.equal(moment.decode(signed), values)


@SIGNED
def test_8bit_lets_a_maximum_grow_slowly(signed):
    """A maximum that grows by 1 % in each step must not be held at the top code of its scale."""
    x, held = torch.tensor([1.0]), Moment.filled(1, "8bit", 1.0, signed=signed)
    for index in range(1, 500):
        grown = held.decode(signed) * 1.01
        held.write(grown, signed, random_bits(1, key=7, step=index, first=0) & 0xFFFF)
        x = x * 1.01
    assert 0.2 < (held.decode(signed) / x).item() < 5.0


@SIGNED
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_8bit_shows_what_is_not_finite(signed, bad):
    x = torch.ones(2 * BLOCK)
    x[3] = bad
    moment = Moment.filled(2 * BLOCK, "8bit", signed=signed)
    moment.write(x, signed)
    assert moment.decode(signed)[:BLOCK].isnan().all()
    assert (moment.decode(signed)[BLOCK:] == 1.0).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_moment_says_what_it_is(fmt):
    moment = Moment.filled(1000, fmt, 0.5, "cpu", True)
    assert (moment.format, moment.numel) == (fmt, 1000)
    assert moment.nbytes == {"fp32": 4000, "bf16": 2000, "8bit": 1000 + 4 * 4}[fmt]
    assert (moment.decode(True) == 0.5).all() and moment.decode(True).dtype == torch.float32
    assert (Moment.filled(1000, fmt).decode(False) == 0).all()
    part = moment.narrow(256, 744)
    assert part.numel == 744
    part.write(torch.full((744,), 2.0), True)
    assert moment.decode(True).tolist() == [0.5] * 256 + [2.0] * 744
    assert Moment.filled(0, fmt).decode(True).numel() == 0
    assert [blocks_of(n) for n in (0, 1, 256, 257)] == [0, 1, 1, 2]
