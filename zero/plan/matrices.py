"""The matrices in a unit, and the rank that orthogonalises each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

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
        raise ValueError(
            f"parameter '{name}' of shape {tuple(shape)} is no matrix; set its attribute use_muon to false"
        )
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
