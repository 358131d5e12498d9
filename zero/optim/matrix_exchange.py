"""Matrices between ranks: what ranks have of each, in shards and parts, goes to the one that works on it, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from zero.core.comm import exchange
from zero.core.mesh import Mesh
from zero.core.world import Axis
from zero.plan.matrices import Matrix, SharedMatrix, owners, pieces

Matrices = Mapping[int, torch.Tensor]  # [rows, cols] by number
Views = Sequence[Sequence[torch.Tensor]]  # by rank


def replace_matrices(
    shards: Sequence[torch.Tensor],
    matrices: Sequence[tuple[int, SharedMatrix]],
    mesh: Mesh,
    device: torch.device,
    work: Callable[[Matrices], Matrices],
) -> None:
    """Replace each matrix by its result, in this rank's `shards` of the units, [n] each, of one dtype; collective.

    matrices: with the number of the unit. `work` gets those assigned to this rank, on the `device`. One message goes to
    each rank along shard and one back, whatever the number of matrices; and as many to ranks beside, if any matrix has
    parts there. A rank sends nothing of a matrix that it works on itself.
    """
    held = [index for index, (_, each) in enumerate(matrices) if each.spans]
    place_of = dict(zip(held, owners([matrices[index][1] for index in held], mesh.shard.size), strict=True))
    parts = [Matrix("", unit, span.start, 1, span.numel) for unit, each in matrices for span in each.spans]
    index_of = [index for index in held for _ in matrices[index][1].spans]
    none = shards[0].new_empty(0, device=device)
    own: dict[int, list[torch.Tensor]] = {}  # parts of the matrices for ranks at our place along shard
    here, there = _views(mesh.shard), _views(mesh.shard)
    found = {}
    for at, (index, part) in enumerate(zip(index_of, parts, strict=True)):
        if place_of[index][0] == mesh.shard.rank:
            found[at] = none.new_empty(part.span.numel)
            own.setdefault(index, []).append(found[at])
    for at, rank, span in pieces(parts, [len(shard) for shard in shards], mesh.shard.size):
        if rank == mesh.shard.rank:
            shard = shards[parts[at].unit]
            here[place_of[index_of[at]][0]].append(shard.narrow(0, span.start - rank * len(shard), span.numel))
        if at in found:
            there[rank].append(found[at].narrow(0, span.start - parts[at].start, span.numel))
    crosses = any(len(each.boxes) > 1 for _, each in matrices)
    ours = {index: (matrices[index][1], place_of[index][1], each) for index, each in own.items()}
    _there_and_back(here, there, mesh.shard, none, lambda: _replace_shared(ours, mesh.beside, crosses, none, work))


def _replace_shared(
    matrices: Mapping[int, tuple[SharedMatrix, int, Sequence[torch.Tensor]]],
    axis: Axis,
    crosses: bool,
    none: torch.Tensor,
    work: Callable[[Matrices], Matrices],
) -> None:
    """The same of matrices by number, each with the rank that works on it, and this rank's parts; `crosses`: of any."""
    here, there = _views(axis), _views(axis)
    full: dict[int, torch.Tensor] = {}
    for index, (matrix, rank_of, parts) in matrices.items():
        if len(matrix.boxes) == len(parts) == 1:  # it is all here
            full[index] = parts[0].view(matrix.shape)
            continue
        here[rank_of] += parts
        if rank_of == axis.rank:
            full[index] = none.new_empty(matrix.shape)
            for rank, boxes in matrix.boxes.items():
                there[rank] += [full[index][box.slices] for box in boxes]

    def replace() -> None:
        flat = {index: each.view(matrices[index][0].matrix[3:]) for index, each in full.items()}
        for index, result in work(flat).items():
            flat[index].copy_(result)

    _there_and_back(here, there, axis if crosses else None, none, replace)


def _there_and_back(here: Views, there: Views, axis: Axis | None, none: torch.Tensor, work: Callable[[], None]) -> None:
    """Fill `there` with what is `here` on the ranks for this one, work, and fill `here` with what became of it.

    `axis` None: all of it is on this rank, and for it.
    """
    sends, receives = ([sum(part.numel() for part in parts) for parts in views] for views in (here, there))
    flat = torch.cat([none, *(part.reshape(-1).to(none.device) for parts in here for part in parts)])
    if axis is not None:
        flat = exchange(flat, sends, receives, axis, "matrices to their ranks")
    _fill(there, flat)
    work()
    flat = torch.cat([none, *(part.reshape(-1) for parts in there for part in parts)])
    if axis is not None:
        flat = exchange(flat, receives, sends, axis, "matrices from their ranks")
    _fill(here, flat)


def _views(axis: Axis) -> list[list[torch.Tensor]]:
    return [[] for _ in range(axis.size)]


def _fill(views: Views, values: torch.Tensor) -> None:
    every = [part for parts in views for part in parts]
    for part, value in zip(every, values.split([part.numel() for part in every]), strict=True):
        part.copy_(value.view(part.shape))
