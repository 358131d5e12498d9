"""fp32 numbers kept as their bf16 rounding, which is the parameter, and the 16 bits that it lacks, the remainder.

Of the fp32 pattern u the parameter is the upper half, rounded: ``P = (u + 0x8000) >> 16``. The remainder is the lower
half. The carry that rounding sent up is the lower half's top bit, so ``((P - carry) << 16) | low`` gives u back. So the
parameter and its fp32 master take 4 bytes, instead of 6.

Ties go away from zero. With ties to even, as elsewhere in torch, an even P would stand for 65537 masters, one more
than 16 bits can tell apart. The same rounding is used for every bf16 parameter copy of a step, so that training with
either kind of master gives the same parameters. NaN becomes 0x7FC00000 first: others could carry into inf or zero.

A parameter that was written from outside has the remainder 0: the master is then exactly what was written.

Plain torch on any device; the compiled steps do the same (csrc/format_math.h).
"""

from __future__ import annotations

import torch
from torch import Tensor


def clean_bits(x: Tensor) -> Tensor:
    """The patterns of float32 numbers, any shape, as int32; every NaN becomes 0x7FC00000."""
    return x.contiguous().view(torch.int32).masked_fill(x.isnan(), 0x7FC00000)


def _upper(bits: Tensor) -> Tensor:
    # No pattern is near enough to the largest int32 for the sum to wrap: those would be NaN.
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


@torch.no_grad()
def round_bf16(x: Tensor) -> Tensor:
    """Round float32 numbers of any shape to bfloat16, to nearest with ties away from zero; NaN becomes 0x7FC0."""
    return _upper(clean_bits(x))


@torch.no_grad()
def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Cut float32 numbers of any shape into (parameter, bfloat16; remainder, int16), new tensors of that shape."""
    bits = clean_bits(master)
    # The low half is sign-extended rather than truncated from int32, a conversion that C++ did not always define.
    return _upper(bits), ((bits << 16) >> 16).to(torch.int16)


@torch.no_grad()
def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers that :func:`split` cut: exact for all but the payload of a NaN. A new tensor.

    Args:
        param: bfloat16, any shape.
        remainder: int16, the same shape.
    """
    low = remainder.to(torch.int32) & 0xFFFF
    upper = param.contiguous().view(torch.int16).to(torch.int32) - (low >> 15)
    return ((upper << 16) | low).view(torch.float32)
