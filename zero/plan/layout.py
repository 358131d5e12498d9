"""The place of each parameter in the flat buffer of its unit, and the part that a rank owns.

Words: a *span* is a half-open range of elements; a *fragment* is the part of one parameter in
one shard; *numel* counts elements. A layout depends on the world size and never on the stage, so that the
same element has the same place whatever is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# Elements. 16 x fp32 is one cache line and one AVX-512 vector; 16 x bf16 is two 128-bit GPU accesses.
ALIGNMENT = 16


class Span(NamedTuple):
    """Elements [start, start + numel) of a flat buffer."""

    start: int
    numel: int

    @property
    def stop(self) -> int:
        """First element after the span."""
        return self.start + self.numel

    def intersect(self, other: Span) -> Span:
        """The common part; numel 0 if there is none."""
        start = max(self.start, other.start)
        return Span(start, max(0, min(self.stop, other.stop) - start))


class Fragment(NamedTuple):
    """A part of one parameter: `numel` elements from `start` of the flattened parameter, at `at` of the shard."""

    name: str
    start: int
    at: int
    numel: int


@dataclass(frozen=True)
class Layout:
    """The flat buffer of one unit: parameter name -> span, padded so that it divides by the world size."""

    spans: Mapping[str, Span]
    numel: int
    world_size: int

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        """The padding, which belongs to no parameter and must be zero in a gradient."""
        gaps, end = [], 0
        for span in self.spans.values():
            if span.start > end:
                gaps.append(Span(end, span.start - end))
            end = span.stop
        if self.numel > end:
            gaps.append(Span(end, self.numel - end))
        return tuple(gaps)

    def shard(self, rank: int, parts: int) -> Span:
        """The span that `rank` of `parts` owns. `parts` must divide the layout's world size."""
        if parts < 1 or self.world_size % parts:
            raise ValueError(f"a layout for {self.world_size} ranks cannot be cut into {parts} shards")
        numel = self.numel // parts
        return Span(rank * numel, numel)

    def fragment(self, name: str, window: Span) -> Fragment:
        """The fragment of one parameter inside `window`; numel 0 if there is none."""
        span = self.spans[name]
        common = span.intersect(window)
        if not common.numel:
            return Fragment(name, 0, 0, 0)
        return Fragment(name, common.start - span.start, common.start - window.start, common.numel)

    def fragments(self, window: Span) -> tuple[Fragment, ...]:
        """The fragments of parameters inside `window`, in order."""
        pieces = (self.fragment(name, window) for name in self.spans)
        return tuple(piece for piece in pieces if piece.numel)


def make_layout(numels: Mapping[str, int], world_size: int, alignment: int = ALIGNMENT) -> Layout:
    """Place parameters one after the other, each on an aligned start, and pad the end.

    `numels` maps name -> elements, in the order of the buffer. The total is a multiple of `world_size` x
    `alignment` (elements, a multiple of ALIGNMENT), so that every shard starts aligned too. It is never 0, so that each
    rank has something to send.
    """
    spans, end = {}, 0
    for name, numel in numels.items():
        spans[name] = Span(end, numel)
        end = round_up(end + numel, alignment)
    return Layout(spans, round_up(max(end, 1), world_size * alignment), world_size)


def round_up(numel: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `numel`."""
    return -(-numel // multiple) * multiple


# Reading order, 1 of 9; next: zero/core/param_buffer.py, what is in memory of a unit, and the moves between its states.
