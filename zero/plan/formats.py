"""How the optimizer keeps its state: what a master is made of, the format of the moments, and for which elements.

A master is fp32 ("fp32"), or the 16 bits by which it differs from the bf16 parameter ("remainder"). Moments are
"fp32", "bf16" or "8bit"; in the last two, small tensors, norms and biases keep fp32 moments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from zero.plan.layout import ALIGNMENT, Span
from zero.plan.units import UnitPlan

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "int16": 2, "int8": 1, "uint8": 1}
BLOCK = 256  # elements that share one scale in 8bit, and one word of the random bits of stochastic rounding
COMPACT_NUMEL = 4096  # parameters from this many elements on may have moments in fewer bits than fp32
WIRE_BLOCK = 64  # elements that share a scale where what travels has 8 bits
WIRE_RECORD = WIRE_BLOCK + 2  # bytes of them and of it


class Formats(NamedTuple):
    """The state of one optimizer: the form of its masters, the format of its moments, and how many moments there are.

    `states` counts moments per element: 2 for Adam, 1 for Lion, 0 for SGD without momentum; `by_group` those of each
    parameter group, where they differ.
    """

    master: str = "fp32"
    moments: str = "fp32"
    states: int = 2
    by_group: tuple[int, ...] = ()

    def of_unit(self, unit: UnitPlan) -> Formats:
        """The same with the number of states that the unit's group has."""
        return self._replace(states=self.by_group[unit.group]) if self.by_group else self

    @property
    def alignment(self) -> int:
        """What starts in a flat buffer are multiples of, in elements: no block may have two parameters or ranks."""
        return ALIGNMENT if self.moments == "fp32" else BLOCK

    def master_dtype(self, dtype: str) -> str | None:
        """What masters beside parameters of `dtype` are kept in; None in fp32, where the parameter is the master."""
        if ITEMSIZE[dtype] >= 4:
            return None
        return "int16" if self.remainder(dtype) else "fp32"

    def master_nbytes(self, numel: int, dtype: str) -> int:
        """Bytes of `numel` masters beside parameters of `dtype`."""
        kept = self.master_dtype(dtype)
        return 0 if kept is None else ITEMSIZE[kept] * numel

    def remainder(self, dtype: str) -> bool:
        """Whether masters of parameters of `dtype` are kept as remainders, which only bf16 ones can be."""
        return self.master == "remainder" and dtype == "bf16"

    def moment_arrays(self, numel: int, format: str) -> tuple[tuple[str, int], ...]:
        """What one moment of `numel` elements is made of, dtype and elements of each: values, and in 8 bit scales."""
        if format == "8bit":
            return ("uint8", numel), ("fp32", -(-numel // BLOCK))
        return ((format, numel),)

    def moments_nbytes(self, numel: int, format: str | None = None) -> int:
        """Bytes of all moments of `numel` elements, scales included, in `format` (default: that of the moments)."""
        arrays = self.moment_arrays(numel, format or self.moments)
        return self.states * sum(ITEMSIZE[dtype] * count for dtype, count in arrays)


def wire_alignment(alignment: int, section: Any) -> int:
    """`alignment`, or more where a section `zero_optimization` has something travel in 8 bits."""
    coded = section.zero_quantized_weights or section.zero_quantized_gradients
    return max(alignment, WIRE_BLOCK) if coded else alignment


def wire_nbytes(numel: int) -> int:
    """Bytes of `numel` elements, a multiple of WIRE_BLOCK, that travel in 8 bits."""
    return numel // WIRE_BLOCK * WIRE_RECORD


def resting_dtype(compute: str, accumulate: str, rounded: bool) -> str:
    """The dtype of reduced gradients in host memory: that in which they add up, or the 16 bits that lose nothing.

    Those are enough for what is `rounded` to them already: where one backward makes a step and nobody here adds up
    ranks.
    """
    return compute if rounded and compute != "fp32" else accumulate


class Run(NamedTuple):
    """Neighbours in a shard, `numel` elements from `start` of it, whose moments have one format."""

    start: int
    numel: int
    format: str


def is_compact(numel: int, ndim: int) -> bool:
    """Whether a parameter's moments may be kept in fewer bits than fp32; it is asked of the whole parameter."""
    return ndim >= 2 and numel >= COMPACT_NUMEL


def runs(unit: UnitPlan, window: Span, moments: str) -> tuple[Run, ...]:
    """Cut `window`, a shard of the unit, into runs of one format each, in order and without gaps.

    The padding behind a parameter goes with it. Unless `moments` is "fp32", the unit must have been laid out
    with `Formats.alignment`; then every run begins and ends on a multiple of BLOCK, of the unit and of the shard.
    """
    if moments == "fp32":
        return (Run(0, window.numel, "fp32"),)
    starts = [span.start for span in unit.layout.spans.values()]
    parts: list[Run] = []
    for spec, start, stop in zip(unit.params, starts, [*starts[1:], unit.layout.numel], strict=True):
        part = Span(start, stop - start).intersect(window)
        whole = spec.numel if spec.cut is None else spec.cut.full_numel
        # A block of another cutting would be of other elements, with another scale.
        fits = moments != "8bit" or spec.cut is None or spec.cut.in_blocks(BLOCK) is not None
        format = moments if fits and is_compact(whole, spec.ndim) else "fp32"
        if not part.numel:
            continue
        if parts and parts[-1].format == format:
            parts[-1] = parts[-1]._replace(numel=parts[-1].numel + part.numel)
        else:
            parts.append(Run(part.start - window.start, part.numel, format))
    return tuple(parts)
