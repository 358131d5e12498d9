"""Moments of an optimizer in fp32, in bf16 or in 8 bit: how they are stored, rounded and read.

bf16 is rounded stochastically (Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015): up with the
probability that keeps the mean. A second moment changes by 1e-3 of itself in a step; rounding to nearest would lose
that.

8bit has one fp32 scale for each block of 256 elements (after Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", ICLR 2022), here a power of two, and codes that are small floats: sign, 4 bits exponent, 3 bits mantissa,
or 5 and 3 bits for states that are never negative. Encoding is a subtraction and a shift of the fp32 pattern, rounded
stochastically as well. A value below the smallest code becomes zero in signed states. In unsigned ones it
becomes that code: the root of a second moment is a divisor. A block with an element that is not finite, or not below
1.875 x 2^127, reads as NaN from then on, never as zeros.

Random bits are a function of (key, step, element index), not of a generator's state: splitmix64 (Steele, Lea & Flood,
OOPSLA 2014) per block of 256, lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018) per element. So runs
are repeatable, however they are cut into shards and threads.

Plain torch on any device, exact integer operations; the compiled steps do the same (csrc/format_math.h).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zero.kernels.remainder import clean_bits
from zero.plan.formats import BLOCK as BLOCK

FORMATS = ("fp32", "bf16", "8bit")  # the index is the code of csrc/format_math.h
NEAREST = 0x8000  # in place of 16 random bits: rounds to nearest, ties away from zero

# float64 is the "fp32" of float64 masters, which only the plain torch step takes.
_FORMAT_OF = {torch.float32: "fp32", torch.float64: "fp32", torch.bfloat16: "bf16", torch.uint8: "8bit"}
_DTYPE_OF = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1


def blocks_of(numel: int) -> int:
    """How many blocks, and so scales, ``numel`` elements have."""
    return -(-numel // BLOCK)


def mix64(x: int) -> int:
    """The finalizer of splitmix64, on integers below 2^64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def random_bits(numel: int, *, key: int, step: int, first: int, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits for each of the elements ``first`` to ``first + numel``: int64 [numel], in [0, 2^32).

    `key`: which unit; `step`: counted from 1; `first`: index in the unit, a multiple of 256. The first state of a
    formula uses the low 16 bits, the second the high ones.
    """
    seed, block = mix64((key * 0x9E3779B97F4A7C15 + step) & _MASK64), first // BLOCK
    # One Python number per 256 elements: torch has no unsigned 64-bit product.
    words = [mix64((seed + block + i) & _MASK64) & _MASK32 for i in range(blocks_of(numel))]
    lanes = torch.arange(BLOCK, dtype=torch.int64, device=device) * 0x9E3779B9
    x = (torch.tensor(words, dtype=torch.int64, device=device)[:, None] + lanes).view(-1)[:numel] & _MASK32
    x ^= x >> 16
    x *= 0x7FEB352D
    x &= _MASK32
    x ^= x >> 15
    x *= 0x846CA68B - (1 << 32)  # the same modulo 2^32, and the product stays inside int64
    x &= _MASK32
    x ^= x >> 16
    return x


def _per_element(of_block: Tensor, numel: int) -> Tensor:
    return of_block.repeat_interleave(BLOCK)[:numel]


def _lowest(signed: bool) -> int:
    """How many powers of two the smallest code is below the scale."""
    return 15 if signed else 31


def _to_8bit(x: Tensor, signed: bool, random16: Tensor | int) -> tuple[Tensor, Tensor]:
    """fp32 [n] to (codes uint8 [n], scales fp32 [ceil(n / 256)]). Without signs, those of x are ignored."""
    bits = x.view(torch.int32).to(torch.int64)
    size = bits & 0x7FFFFFFF
    padded = size.new_zeros(blocks_of(x.numel()) * BLOCK)
    padded[: x.numel()] = size
    largest = padded.view(-1, BLOCK).amax(1)
    # A maximum within half a code of the next power of two uses that. So no code overflows, and a maximum that grows
    # by less than a code in each step still grows.
    exponent = ((largest + 0x100000) >> 23).clamp(max=255)
    code = size - _per_element((exponent - _lowest(signed)) << 23, x.numel())
    code += random16 << 4
    code >>= 20
    if signed:
        code.clamp_(0, 127)
        code += ((bits < 0) & (code > 0)).to(torch.int64) << 7
    else:
        code.clamp_(1, 255)
        code *= size > 0
    finite = exponent < 255
    # Else the block holds zeros (or less than 2^-126), or is not finite.
    code *= _per_element((exponent > 0) & finite, x.numel())
    scale = torch.where(finite, exponent << 23, 0x7FC00000)
    return code.to(torch.uint8), scale.to(torch.int32).view(torch.float32)


def _from_8bit(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """(codes uint8 [n], scales fp32 [ceil(n / 256)]) to fp32 [n]."""
    code = codes.to(torch.int32)
    size = code & 127 if signed else code
    base = ((size << 20) + ((127 - _lowest(signed)) << 23)).masked_fill_(size == 0, 0)
    value = base.view(torch.float32) * _per_element(scales, codes.numel())
    if not signed:
        return value
    return (value.view(torch.int32) | ((code >> 7) << 31)).view(torch.float32)


@dataclass(frozen=True)
class Moment:
    """One state of an optimizer for n elements, in one of ``FORMATS``.

    values: shape [n]; float32 (or float64, beside a float64 master), bfloat16, or uint8 codes.
    scales: float32 [ceil(n / 256)] on the same device with codes, one per block of 256; None otherwise. A step
        checks both.
    """

    values: Tensor
    scales: Tensor | None = None

    @property
    def format(self) -> str:
        """Which of ``FORMATS``."""
        return _FORMAT_OF[self.values.dtype]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.values.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @classmethod
    def filled(
        cls, numel: int, format: str, value: float = 0.0, device: torch.device | str = "cpu", signed: bool = True
    ) -> Moment:
        """A new moment with all elements ``value``, rounded as by :meth:`write`."""
        if format not in FORMATS:
            raise ValueError(f"format: got {format!r}; wanted one of {', '.join(FORMATS)}")
        values = torch.zeros(numel, dtype=_DTYPE_OF[format], device=device)
        scales = torch.zeros(blocks_of(numel), device=device) if format == "8bit" else None
        moment = cls(values, scales)
        if value != 0.0:
            moment.fill(value, signed)
        return moment

    @torch.no_grad()
    def fill(self, value: float, signed: bool) -> None:
        """Make all elements ``value``, rounded as by :meth:`write`."""
        self.values.zero_()
        if self.scales is not None:
            self.scales.zero_()
        if value != 0.0:
            self.write(torch.full_like(self.values, value, dtype=torch.float32), signed)

    @torch.no_grad()
    def decode(self, signed: bool) -> Tensor:
        """The elements as float32 [n]: the values themselves, not a copy, if they are float32.

        `signed`: whether they can be negative, which decides the meaning of "8bit" codes.
        """
        if self.scales is not None:
            return _from_8bit(self.values, self.scales, signed)
        return self.values if self.format == "fp32" else self.values.to(torch.float32)

    @torch.no_grad()
    def write(self, values: Tensor, signed: bool, random16: Tensor | None = None) -> None:
        """Replace all elements by `values` [n], float32 (or float64 if this moment is).

        random16: int64 [n] in [0, 2^16), for stochastic rounding; None rounds to nearest, ties away from zero.
        """
        bits = NEAREST if random16 is None else random16
        if self.scales is not None:
            codes, scales = _to_8bit(values.contiguous(), signed, bits)
            self.values.copy_(codes)
            self.scales.copy_(scales)
        elif self.format == "bf16":
            # Up with the probability bits / 2^16.
            upper = (clean_bits(values.contiguous()) + bits) >> 16
            self.values.copy_(upper.to(torch.int16).view(torch.bfloat16))
        else:
            self.values.copy_(values)

    def narrow(self, start: int, numel: int) -> Moment:
        """The elements from ``start`` on, as a view; ValueError if the span is not inside.

        Also if with "8bit" it does not begin and end on a block's boundary; it may end with the last element.
        """
        stop = start + numel
        if start < 0 or numel < 0 or stop > self.numel:
            raise ValueError(f"start, numel: got {start}, {numel}; wanted a span within {self.numel} elements")
        if self.scales is None:
            return Moment(self.values[start:stop])
        if start % BLOCK != 0 or (stop % BLOCK != 0 and stop != self.numel):
            raise ValueError(
                f"start, numel: got {start}, {numel}; wanted multiples of {BLOCK}, the elements that share a scale"
            )
        return Moment(self.values[start:stop], self.scales[start // BLOCK : blocks_of(stop)])
