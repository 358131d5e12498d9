"""The global gradient norm, summed so that no stage changes its bits, and the factor that limits it."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zero.core import comm
from zero.core.mesh import Mesh
from zero.core.unit import Unit
from zero.kernels.norm import sum_squares, sum_squares_into
from zero.memory.threads import host_threads


class Says(enum.IntFlag):
    """What a rank tells the others with its part of the norm."""

    LATE = 1  # gradients have come that are not reduced yet
    HELD = 2  # GatheredParameters holds units open


class Norm(NamedTuple):
    """L2 norm of the reduced gradients over all units and ranks, and what each rank said, in their order."""

    value: float
    said: list[Says]

    def ranks(self, what: Says) -> list[int]:
        """The ranks that have said it."""
        return [rank for rank, word in enumerate(self.said) if what in word]


def global_norm(units: Sequence[Unit], mesh: Mesh, says: Says) -> Norm:
    """The norm of the plain sum (no mean taken); collective. What any rank `says` reaches all with it.

    Every rank squares its 1/world_size span of each unit in fp64, whether its shard is that span or, where
    gradients are not cut, the whole; units add up first, then spans in order. So all stages add the same
    numbers in the same order.
    """
    mine = 0.0
    for squares in _numbers([_squares(unit, mesh) for unit in units]):
        mine += squares
    device = units[0].full.device if units else "cpu"
    values = torch.tensor([mine, float(says)], dtype=torch.float64, device=device)
    rows = comm.gather_scalars(values, mesh.data).tolist()
    said = [Says(int(word)) for _, word in rows]
    total = 0.0
    for place in mesh.by_span:
        total += rows[place][0]
    return Norm(math.sqrt(total) if total >= 0 else math.nan, said)  # a NaN compares false


def _squares(unit: Unit, mesh: Mesh) -> float | torch.Tensor:
    """The sum of the squares of this rank's span: where it is computed on a GPU, an fp64 number there."""
    known = unit.gradients.sum.squares()
    if known is not None:
        return known
    part = unit.gradients.shard.chunk(mesh.replica.size)[mesh.replica.rank]
    if not part.is_cuda:
        # What the host holds of a GPU's model it reads with all threads it has, as its updates do.
        return sum_squares(part, host_threads() if unit.full.is_cuda else None)
    squares = torch.empty((), dtype=torch.float64, device=part.device)
    sum_squares_into(part, squares)
    return squares


def _numbers(values: Sequence[float | torch.Tensor]) -> list[float]:
    """The same as Python numbers; a device is waited for once."""
    there = [value for value in values if isinstance(value, torch.Tensor)]
    read = iter(torch.stack(there).tolist() if there else ())
    return [next(read) if isinstance(value, torch.Tensor) else value for value in values]


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of norm `norm` are multiplied with so that it is at most `limit`; 1 when limit is 0.

    As torch.nn.utils.clip_grad_norm_: limit / (norm + 1e-6), never above 1.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
