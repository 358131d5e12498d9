"""Work on whole matrices that lie in the shards of several ranks: each goes to one rank, which returns its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from zero.core.comm import exchange
from zero.core.world import Axis
from zero.plan.matrices import Matrix, assign, pieces

Matrices = Mapping[int, torch.Tensor]  # [rows, cols] by number


def replace_matrices(
    shards: Sequence[torch.Tensor],
    matrices: Sequence[Matrix],
    axis: Axis,
    device: torch.device,
    work: Callable[[Matrices], Matrices],
) -> None:
    """Replace each matrix by its result, in this rank's `shards` of the units, [n] each, of one dtype; collective.

    `work` gets the matrices assigned to this rank, on the `device`. One message goes to each rank and one back,
    whatever the number of matrices. A rank sends nothing of a matrix that it works on itself.
    """
    rank_of = assign(matrices, axis.size)
    numels = [shard.numel() for shard in shards]
    every = pieces(matrices, numels, axis.size)
    leaving = sorted((one for one in every if one.rank == axis.rank), key=lambda one: rank_of[one.index])
    coming = sorted((one for one in every if rank_of[one.index] == axis.rank), key=lambda one: one.rank)
    sends, receives = [0] * axis.size, [0] * axis.size
    here, there = [], []
    for one in leaving:
        unit = matrices[one.index].unit
        sends[rank_of[one.index]] += one.span.numel
        here.append(shards[unit].narrow(0, one.span.start - axis.rank * numels[unit], one.span.numel))
    none = shards[0].new_empty(0)
    whole = {
        index: torch.empty(matrix.rows, matrix.cols, dtype=none.dtype, device=device)
        for index, matrix in enumerate(matrices)
        if rank_of[index] == axis.rank
    }
    for one in coming:
        receives[one.rank] += one.span.numel
        there.append(whole[one.index].view(-1).narrow(0, one.span.start - matrices[one.index].start, one.span.numel))
    _fill(there, exchange(torch.cat([none, *here]).to(device), sends, receives, axis, "matrices to their ranks"))
    for index, result in work(whole).items():
        whole[index].copy_(result)
    back = torch.cat([none.to(device), *there])
    _fill(here, exchange(back, receives, sends, axis, "matrices from their ranks"))


def _fill(parts: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    for part, value in zip(parts, values.split([part.numel() for part in parts]), strict=True):
        part.copy_(value)
