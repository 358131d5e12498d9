"""fp32 numbers stored as their bf16 rounding, which is the parameter, and the missing 16 bits, the remainder.

Of the fp32 pattern u the parameter is the upper half, rounded: ``P = (u + 0x8000) >> 16``. The remainder is the lower
half. The carry that rounding sent up is the lower half's top bit, so ``((P - carry) << 16) | low`` gives u back. So the
parameter and its fp32 master take 4 bytes, instead of 6.

Ties go away from zero. With ties to even, as elsewhere in torch, an even P would stand for 65537 masters, one more
than 16 bits can tell apart. The same rounding is used for every bf16 parameter copy of a step, so that training with
either kind of master gives the same parameters. NaN becomes 0x7FC00000 first: others could carry into inf or zero.

A parameter that was written from outside has the remainder 0: the master is then exactly the written value.

Plain torch on any device; the compiled steps do the same (csrc/format_math.h).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK = 1 << 17  # elements per pass on a CPU, to stay in its cache


def clean_bits(x: Tensor) -> Tensor:
    """The patterns of float32 numbers, any shape, as read-only int32; every NaN becomes 0x7FC00000."""
    bits = x.contiguous().view(torch.int32)
    # A sum costs a tenth of a test of each number, and is NaN if one of them is. On a GPU the host would wait for it.
    if x.device.type == "cpu" and not x.sum().isnan():
        return bits
    return bits.masked_fill(x.isnan(), 0x7FC00000)


@torch.no_grad()
def round_bf16(x: Tensor) -> Tensor:
    """Round float32 numbers of any shape to bfloat16, to nearest with ties away from zero; NaN becomes 0x7FC0."""
    param = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    write_rounded(x.contiguous().view(-1), param.view(-1))
    return param


@torch.no_grad()
def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Cut float32 numbers of any shape into (parameter, bfloat16; remainder, int16), new tensors of that shape."""
    remainder = torch.empty(master.shape, dtype=torch.int16, device=master.device)
    write_remainder(master.contiguous().view(-1), remainder.view(-1))
    return round_bf16(master), remainder


@torch.no_grad()
def write_rounded(x: Tensor, param: Tensor) -> None:
    """:func:`round_bf16` of float32 [n] into bfloat16 [n], without temporary memory of that size."""
    for bits, out in _cached(x, param.view(torch.int16)):
        # No pattern is near enough to the largest int32 for the sum to wrap: those would be NaN.
        out.copy_((bits + 0x8000).bitwise_right_shift_(16))


@torch.no_grad()
def write_remainder(x: Tensor, remainder: Tensor) -> None:
    """The remainders of float32 [n] into int16 [n], without temporary memory of that size."""
    for bits, out in _cached(x, remainder):
        # The low half is sign-extended rather than truncated from int32, a conversion that C++ did not always define.
        out.copy_((bits << 16).bitwise_right_shift_(16))


def _cached(x: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The patterns of `x` [n], in parts that stay in a CPU's cache, each with the part of `out` [n] for it."""
    chunk = _CHUNK if x.device.type == "cpu" else max(1, x.numel())
    for start in range(0, x.numel(), chunk):
        yield clean_bits(x[start : start + chunk]), out[start : start + chunk]


@torch.no_grad()
def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers that :func:`split` cut: exact for all but the payload of a NaN. A new tensor."""
    low = remainder.to(torch.int32) & 0xFFFF
    upper = param.contiguous().view(torch.int16).to(torch.int32) - (low >> 15)
    return ((upper << 16) | low).view(torch.float32)
