"""The matrices in a unit, the ranks that have parts of them, and the rank that orthogonalises each."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from zero.plan.cut import Box, whole
from zero.plan.layout import Span


class Matrix(NamedTuple):
    """A matrix [rows, cols], stored by rows from element `start` of unit number `unit` on; `name`: for messages.

    It is a parameter, one of a stack of experts, or a part of a fused projection.
    """

    name: str
    unit: int
    start: int
    rows: int
    cols: int

    @property
    def span(self) -> Span:
        """Its elements in the flat buffer of the unit."""
        return Span(self.start, self.rows * self.cols)

    @property
    def flops(self) -> int:
        """FLOPs of one Newton-Schulz step: two products of the short side's square, and one of the whole matrix."""
        short, long = sorted((self.rows, self.cols))
        return 4 * short**2 * long + 2 * short**3


Split = Mapping[str, int | Sequence[int]]  # by patterns of names: the number of equal parts of the rows, or the rows


def matrices_of(name: str, shape: Sequence[int], split: Split, unit: int = 0, start: int = 0) -> list[Matrix]:
    """The matrices of one parameter that begins at element `start` of its unit.

    Two dimensions are a matrix, three a stack of them, four or more (filters) a matrix with a row for each output.
    Raises ValueError for fewer dimensions, and for parts that do not add up to the rows.
    """
    if len(shape) < 2:
        why = f"of shape {tuple(shape)} is no matrix; set its attribute use_muon to false"
        raise ValueError(f"parameter '{name}' {why}")
    stack, shape = (shape[0], shape[1:]) if len(shape) == 3 else (1, shape)
    rows, cols = shape[0], math.prod(shape[1:])
    parts = next((parts for pattern, parts in split.items() if fnmatchcase(name, pattern)), 1)
    cut = [rows // parts] * parts if isinstance(parts, int) else list(parts)
    if sum(cut) != rows:
        raise ValueError(f"optimizer.params.split: '{name}' has {rows} rows, which do not split into {parts}")
    found = []
    for index in range(stack):
        for part, count in enumerate(cut):
            of = [f"[{index}]"] * (stack > 1) + [f" part {part}"] * (len(cut) > 1)
            if count * cols:  # an empty matrix has no norm, no direction and no rate
                found.append(Matrix(name + "".join(of), unit, start, count, cols))
            start += count * cols
    return found


def assign(matrices: Sequence[Matrix], ranks: int) -> list[int]:
    """A rank for each matrix, so that the busiest has little more than its share of the work.

    The longest processing time first (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: at most 4/3 of the
    best). Ties go by name, then to the lowest rank, so that all ranks find the same.
    """
    loads, found = [0] * ranks, [0] * len(matrices)
    for index in sorted(range(len(matrices)), key=lambda index: (-matrices[index].flops, matrices[index])):
        found[index] = rank = loads.index(min(loads))
        loads[rank] += matrices[index].flops
    return found


class SharedMatrix(NamedTuple):
    """A matrix of which ranks beside each other have parts, or one of them all.

    matrix:  its place in the parameter `param`, which has so many `rows`; both as they are where nothing is cut;
    shape:   with all dims of the parameter;
    boxes:   of the matrix, by the places of the ranks that have any;
    spans:   of the unit's flat buffer, in which this rank has its boxes.
    """

    param: str
    rows: int
    matrix: Matrix
    shape: tuple[int, ...]
    boxes: Mapping[int, Sequence[Box]]
    spans: Sequence[Span]


def shared_matrices(
    name: str, shape: Sequence[int], split: Split, boxes: Mapping[int, Sequence[Box]], rank: int, start: int
) -> list[SharedMatrix]:
    """The matrices of a parameter of this full shape, of which ranks have `boxes`; `rank` has its from `start` on.

    What is common to a box and a matrix is consecutive in the box: of a matrix all dims but the first are whole, and
    of a stack its place is one.
    """
    found = []
    for matrix in matrices_of(name, shape, split):
        (around,) = whole(shape).pieces(matrix.start, matrix.span.numel)
        parts: dict[int, list[Box]] = {}
        spans = []
        for place, those in boxes.items():
            begin = start
            for box in those:
                if (common := box.intersect(around)) is not None:
                    offset = tuple(map(operator.sub, common.offset, around.offset))
                    parts.setdefault(place, []).append(Box(offset, common.sizes))
                    spans += [Span(begin + box.index(common.offset), common.numel)] * (place == rank)
                begin += box.numel
        found.append(SharedMatrix(name, math.prod(shape) // matrix.cols, matrix, around.sizes, parts, spans))
    return found


def owners(matrices: Sequence[SharedMatrix], ranks: int) -> list[tuple[int, int]]:
    """For each the rank that works on it: its place along shard, of so many ranks, and beside.

    It is one of those that have a part. All that have parts of the same matrices find the same, if these come in order.
    """
    found = [(0, 0)] * len(matrices)
    for places in dict.fromkeys(tuple(each.boxes) for each in matrices):
        those = [index for index, each in enumerate(matrices) if tuple(each.boxes) == places]
        for index, rank in zip(those, assign([matrices[i].matrix for i in those], ranks * len(places)), strict=True):
            found[index] = rank // len(places), places[rank % len(places)]
    return found


class Piece(NamedTuple):
    """The part of matrix number `index` in one rank's shard: a span of the unit's flat buffer."""

    index: int
    rank: int
    span: Span


def pieces(matrices: Sequence[Matrix], numels: Sequence[int], ranks: int) -> list[Piece]:
    """The pieces of all matrices, in order; numels: the elements of one shard of each unit, by the unit's number."""
    found = []
    for index, matrix in enumerate(matrices):
        numel = numels[matrix.unit]
        windows = [Span(rank * numel, numel) for rank in range(ranks)]
        parts = [Piece(index, rank, matrix.span.intersect(window)) for rank, window in enumerate(windows)]
        found += [part for part in parts if part.span.numel]
    return found
