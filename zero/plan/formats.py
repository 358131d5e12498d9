"""How the optimizer stores its state: the form of masters, the format of moments, and for which elements.

A master is fp32 ("fp32"), or the 16 bits that the bf16 parameter lacks ("remainder"). Moments are "fp32", "bf16" or
"8bit"; in the last two, small tensors, norms and biases keep fp32 moments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from zero.plan.layout import ALIGNMENT, Span
from zero.plan.units import UnitPlan

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "int16": 2, "int8": 1, "uint8": 1}
BLOCK = 256  # elements that share one scale in 8bit, and one word of the random bits of stochastic rounding
COMPACT_NUMEL = 4096  # parameters from this many elements on may have moments in fewer bits than fp32
WIRE_BLOCK = 64  # elements that share a scale in messages of 8 bits
WIRE_RECORD = WIRE_BLOCK + 2  # bytes of a block with its scale
WIRE_GROUP = 8  # blocks whose codes stand one after the other, their scales behind them


class Formats(NamedTuple):
    """The state of one optimizer: the form of its masters, the format of its moments, and how many moments there are.

    `states` counts moments per element: 2 for Adam, 1 for Lion, 0 for SGD without momentum; `by_group` counts them per
    parameter group, if they differ.
    """

    master: str = "fp32"
    moments: str = "fp32"
    states: int = 2
    by_group: tuple[int, ...] = ()

    def of_unit(self, unit: UnitPlan) -> Formats:
        """The same with the number of states of the unit's group."""
        return self._replace(states=self.by_group[unit.group]) if self.by_group else self

    @property
    def alignment(self) -> int:
        """The alignment of starts in a flat buffer, in elements: no block may contain two parameters or ranks."""
        return ALIGNMENT if self.moments == "fp32" else BLOCK

    def master_dtype(self, dtype: str) -> str | None:
        """The dtype of masters beside parameters of `dtype`; None for fp32, where the parameter is the master."""
        if ITEMSIZE[dtype] >= 4:
            return None
        return "int16" if self.remainder(dtype) else "fp32"

    def remainder(self, dtype: str) -> bool:
        """Whether masters of parameters of `dtype` are stored as remainders, which is possible only for bf16."""
        return self.master == "remainder" and dtype == "bf16"

    def moment_arrays(self, numel: int, format: str) -> tuple[tuple[str, int], ...]:
        """The arrays of one moment of `numel` elements, as dtype and elements: values, and in 8 bit also scales."""
        if format == "8bit":
            return ("uint8", numel), ("fp32", -(-numel // BLOCK))
        return ((format, numel),)

    def moments_nbytes(self, numel: int, format: str | None = None) -> int:
        """Bytes of all moments of `numel` elements, scales included, in `format` (default: that of the moments)."""
        arrays = self.moment_arrays(numel, format or self.moments)
        return self.states * sum(ITEMSIZE[dtype] * count for dtype, count in arrays)


def wire_alignment(alignment: int, section: Any) -> int:
    """`alignment`, or more if the section `zero_optimization` has messages in 8 bits."""
    coded = section.zero_quantized_weights or section.zero_quantized_gradients
    return max(alignment, WIRE_BLOCK) if coded else alignment


def wire_nbytes(numel: int) -> int:
    """Bytes of a message in 8 bits of `numel` elements, a multiple of WIRE_BLOCK."""
    return numel // WIRE_BLOCK * WIRE_RECORD


def resting_dtype(compute: str, accumulate: str, rounded: bool) -> str:
    """The dtype of reduced gradients in host memory: that of their accumulation, or 16 bits if these lose nothing.

    They lose nothing if gradients are already `rounded` to them: if a step is one backward and we do not add up
    ranks.
    """
    return compute if rounded and compute != "fp32" else accumulate


class Run(NamedTuple):
    """Consecutive elements of a shard, `numel` from its element `start`, whose moments have one format."""

    start: int
    numel: int
    format: str


def is_compact(numel: int, ndim: int) -> bool:
    """Whether a parameter's moments may have fewer bits than fp32; takes the size of the whole parameter."""
    return ndim >= 2 and numel >= COMPACT_NUMEL


def runs(unit: UnitPlan, window: Span, moments: str) -> tuple[Run, ...]:
    """Cut `window`, a shard of the unit, into runs of one format each, in order and without gaps.

    The padding after a parameter belongs to its run. Unless `moments` is "fp32", the unit's layout must have been made
    with `Formats.alignment`; then every run begins and ends on a multiple of BLOCK, of the unit and of the shard.
    """
    if moments == "fp32":
        return (Run(0, window.numel, "fp32"),)
    starts = [span.start for span in unit.layout.spans.values()]
    parts: list[Run] = []
    for spec, start, stop in zip(unit.params, starts, [*starts[1:], unit.layout.numel], strict=True):
        part = Span(start, stop - start).intersect(window)
        # Blocks from another cut would have other elements, and other scales.
        fits = moments != "8bit" or spec.cut is None or spec.cut.in_blocks(BLOCK) is not None
        format = moments if fits and is_compact(spec.full_numel, spec.ndim) else "fp32"
        if not part.numel:
            continue
        if parts and parts[-1].format == format:
            parts[-1] = parts[-1]._replace(numel=parts[-1].numel + part.numel)
        else:
            parts.append(Run(part.start - window.start, part.numel, format))
    return tuple(parts)
