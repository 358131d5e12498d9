"""The global gradient norm, summed so that no stage changes its bits, and the search for what was not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zero.core import comm
from zero.core.mesh import Mesh
from zero.core.unit import Unit
from zero.kernels.norm import sum_squares


def global_norm(units: Sequence[Unit], mesh: Mesh) -> float:
    """L2 norm of the reduced gradients over all units and ranks, of the plain sum (no mean taken); collective.

    Every rank squares its 1/world_size span of each unit in fp64, whether its shard is that span or, where
    gradients are not cut, the whole; units add up first, then spans in order. So all stages add the same
    numbers in the same order.
    """
    mine = 0.0
    for unit in units:
        mine += sum_squares(unit.gradients.shard.chunk(mesh.replica.size)[mesh.replica.rank])
    device = units[0].shard.device if units else "cpu"
    values = torch.tensor([mine], dtype=torch.float64, device=device)
    total = 0.0
    for value in comm.gather_scalars(values, mesh.reduced_over).flatten().tolist():
        total += value
    return math.sqrt(total) if total >= 0 else math.nan  # a NaN compares false


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of norm `norm` are multiplied with so that it is at most `limit`; 1 when limit is 0.

    As torch.nn.utils.clip_grad_norm_: limit / (norm + 1e-6), never above 1.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def first_not_finite(units: Sequence[Unit], mesh: Mesh) -> str:
    """The name of the first parameter, in order of registration, whose gradient is not finite on any rank.

    A collective over the shard axis; called only when the norm said that there is one.
    """
    names = [spec.name for unit in units for spec in unit.plan.params]
    found = len(names)
    for unit in units:
        own = unit.plan.layout.shard(mesh.shard.rank, mesh.shard.size)
        for fragment in unit.plan.layout.fragments(own):
            if not torch.isfinite(unit.gradients.shard.narrow(0, fragment.at, fragment.numel)).all():
                found = min(found, names.index(fragment.name))
                break
    mine = torch.tensor([float(found)], dtype=torch.float64, device=units[0].shard.device)
    first = int(comm.gather_scalars(mine, mesh.shard, "search for what is not finite").min().item())
    return names[first] if first < len(names) else "none by itself: the squares overflow fp64"
