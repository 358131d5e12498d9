"""Which ranks of a run in plain torch have samples of their own, where others share these with them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from zero.config import Config
from zero.core.comm import Axis, backend_of
from zero.core.torch_private import group_of_members
from zero.parallel.tensor.first_step import broadcast_batch
from zero.plan.grid import DATA, Grid


class Places:
    """The grid of a run's ranks, which all have the whole model; made and closed by all.

    data: along it ranks have samples of their own; summed: the ranks whose gradients are summed, of which those that
    cut the same layers in a run of the engine, and so have the same samples, count once.
    """

    def __init__(self, settings: Config, device: torch.device) -> None:
        there = dist.is_initialized()
        self._rank, world = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)
        self._grid = settings.grid if settings.grid.world == world else Grid(world)
        self._native = there and backend_of(dist.group.WORLD, device) == "nccl"
        self._groups: list[dist.ProcessGroup] = []
        self.data = self._axis(*DATA)
        self.summed = self._grid.ranks((*DATA, "cp"), self._rank)
        broadcasts = settings.tensor_parallel.broadcast_batch and self._grid.size("tp") > 1
        self._beside = self._axis("tp") if broadcasts else None  # who get the batch of the first of them

    def batch(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """What a forward is given, as the engine gives it to the model."""
        return (inputs, kwargs) if self._beside is None else broadcast_batch((inputs, kwargs), self._beside)

    def close(self) -> None:
        """End the groups that were made."""
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups = []

    def _axis(self, *axes: str) -> Axis:
        ranks, group = self._grid.ranks(axes, self._rank), None
        if len(ranks) < self._grid.world:
            self._groups.append(group := group_of_members(f"check {axes}", ranks))
        return Axis(group and weakref.ref(group), len(ranks), ranks.index(self._rank), self._native, ranks=ranks)
