"""A parameter that is a slice of a larger one: its boxes of the full tensor.

Layers that are cut along rows, columns, heads or experts have plain local parameters, each with such a record. It is
used by loading and saving, `safe_get_full_*`, the norm, and optimizers of whole matrices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_CORNERS = 1 << 20  # that are kept while boxes are compared


class Box(NamedTuple):
    """The elements [offset, offset + size) along each dim of a tensor. Its own elements are in row-major order."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its elements."""
        return tuple(math.prod(self.sizes[dim + 1 :]) for dim in range(len(self.sizes)))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it is in a tensor, as an index."""
        return tuple(map(slice, self.offset, self._stops()))

    def index(self, at: Sequence[int]) -> int:
        """The index of its element at these coordinates of the tensor."""
        places = zip(at, self.offset, self.strides, strict=True)
        return sum((place - first) * stride for place, first, stride in places)

    def intersect(self, other: Box) -> Box | None:
        """The intersection of two boxes, or None."""
        first = tuple(map(max, self.offset, other.offset))
        stops = map(min, self._stops(), other._stops())
        sizes = tuple(stop - start for stop, start in zip(stops, first, strict=True))
        return Box(first, sizes) if min(sizes, default=1) > 0 else None

    def pieces(self, start: int, numel: int) -> Iterator[Box]:
        """Boxes that together, in order, are the elements [start, start + numel) of this one."""
        if numel <= 0:
            return
        if len(self.sizes) < 2 or (start == 0 and numel == self.numel):
            first = (self.offset[0] + start, *self.offset[1:]) if self.sizes else ()
            yield Box(first, (numel,)) if len(self.sizes) == 1 else self
            return
        row = self.numel // self.sizes[0]
        while numel > 0:  # a part of a row, whole rows, a part of a row
            number, skip = divmod(start, row)
            rows = numel // row if skip == 0 else 0
            count = rows * row or min(numel, row - skip)
            if rows:
                yield Box((self.offset[0] + number, *self.offset[1:]), (rows, *self.sizes[1:]))
            else:
                for below in Box(self.offset[1:], self.sizes[1:]).pieces(skip, count):
                    yield Box((self.offset[0] + number, *below.offset), (1, *below.sizes))
            start, numel = start + count, numel - count

    def _stops(self) -> Iterator[int]:
        return (first + size for first, size in zip(self.offset, self.sizes, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def places(boxes: Sequence[Box], start: int, numel: int) -> Iterator[tuple[Box, int]]:
    """The elements [start, start + numel) of consecutive boxes: boxes, and how many elements come before each."""
    done, begin = 0, 0
    for box in boxes:
        first, stop = max(start, begin), min(start + numel, begin + box.numel)
        for piece in box.pieces(first - begin, stop - first):
            yield piece, done
            done += piece.numel
        begin += box.numel


@dataclass(frozen=True)
class Cut:
    """The full `shape`, and the local boxes, whose elements follow each other in the local tensor.

    A cut along rows or columns is one box; one of stacked query, key and value is three. Raises ValueError for
    boxes outside of the shape, or that overlap. `every`: the boxes of all ranks beside, once an engine knows them.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    every: tuple[tuple[Box, ...], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if problem := box_error(self.shape, self.boxes):
            raise ValueError(f"Cut: {problem}")

    @property
    def numel(self) -> int:
        """The number of local elements."""
        return sum(box.numel for box in self.boxes)

    @property
    def full_numel(self) -> int:
        """The number of elements of the full tensor."""
        return math.prod(self.shape)

    def in_blocks(self, block: int) -> Cut | None:
        """The same cut of a tensor with one element per `block` neighbours; None if boxes of any rank cut through them.

        Its shape depends on that of the full tensor only: the last dims that together divide by `block` are one.
        """
        inner = [math.prod(self.shape[dim:]) for dim in range(len(self.shape))]
        at = max((dim for dim, numel in enumerate(inner) if numel % block == 0), default=0)
        below, boxes = math.prod(self.shape[at + 1 :]), []
        if any(Cut(self.shape, others).in_blocks(block) is None for others in self.every):
            return None  # all ranks store a state in one format
        for box in self.boxes:
            first, numel = box.offset[at] * below, box.sizes[at] * below
            ends = at == 0 and box.offset[0] + box.sizes[0] == self.shape[0]  # the last block may have fewer neighbours
            if box.sizes[at + 1 :] != self.shape[at + 1 :] or first % block or (numel % block and not ends):
                return None
            boxes.append(Box((*box.offset[:at], first // block), (*box.sizes[:at], -(-numel // block))))
        return Cut((*self.shape[:at], -(-inner[at] // block)), tuple(boxes))


def box_error(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """The error of boxes as parts of a tensor of this shape, or None."""
    if problem := _outside(shape, boxes):
        return problem
    near: list[Box] = []  # that reach the row of the first dim that the next box begins at
    for box in sorted(boxes):
        near = [each for each in near if not shape or each.offset[0] + each.sizes[0] > box.offset[0]]
        if other := next((each for each in near if each.intersect(box)), None):
            return f"boxes {other.offset} + {other.sizes} and {box.offset} + {box.sizes} overlap"
        near.append(box)
    return None


def cover_error(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why boxes are not all elements of a tensor of this shape, each once, or None.

    The number of boxes around each element, less 1, is 0 everywhere just where its differences along all dims are.
    These are not 0 at corners of boxes only, and corners of neighbours cancel: so it takes no pairs of boxes.
    """
    if problem := _outside(shape, boxes):
        return problem
    edges = [tuple(zip(box.offset, box._stops(), strict=True)) for box in (*boxes, whole(shape))]
    counts = Counter(edges[:-1])
    counts[edges[-1]] -= 1
    for dim in range(len(shape)):
        if all(corner[dim] == edges[-1][dim] for corner in counts):
            continue  # not cut
        corners: Counter[tuple[Any, ...]] = Counter()
        for corner, count in counts.items():
            first, stop = corner[dim]
            corners[(*corner[:dim], first, *corner[dim + 1 :])] += count
            corners[(*corner[:dim], stop, *corner[dim + 1 :])] -= count
        counts = Counter({corner: count for corner, count in corners.items() if count})
        if len(counts) > max(_CORNERS, 8 * len(boxes)):
            return f"its {len(boxes)} boxes are cut along too many dims to be compared"
    wrong = min((corner for corner, count in counts.items() if count), default=None)
    if wrong is None:
        return None
    # No corner comes before the first one, so what changes there is all that there is.
    element = tuple(at if isinstance(at, int) else at[0] for at in wrong)
    return f"element {element} lies in {counts[wrong] + 1} of its {len(boxes)} boxes, not in 1"


def _outside(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    full = whole(shape)
    for box in boxes:
        if not len(box.offset) == len(box.sizes) == len(shape) or box.intersect(full) != box:
            return f"box {box.offset} + {box.sizes} does not lie in {tuple(shape)}"
    return None
