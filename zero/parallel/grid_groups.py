"""The groups of a grid as Megatron and DeepSpeed name them: an object for arguments that are called `mpu`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from zero.core.comm import alive
from zero.core.torch_private import group_of_members
from zero.plan.grid import DATA, Grid, by_axis


def groups(of: nn.Module | Mapping[str, int]) -> GridGroups:
    """The groups of ranks by the names of Megatron, for arguments that are called `mpu`.

    of: an engine; or sizes of axes for all ranks, such as {"tp": 2, "pp": 4}, of pp, dp_replicate, dp_shard, cp (or
    sp), tp and ep, with or without `_size` behind the name. What they leave is dp_shard.
    Raises ValueError for sizes that do not make up the ranks there are, and for an engine of only some of them.
    """
    sharded = getattr(of, "_sharded", None)
    grid = None if sharded is None else sharded.meshes.grid
    if isinstance(of, Mapping):
        sizes = by_axis(of)
        grid = Grid(dist.get_world_size(), sizes, ep=sizes.pop("ep", 1))
    if grid is None:
        raise ValueError(f'groups(): got a {type(of).__name__}; wanted an engine, or sizes such as {{"tp": 2}}')
    return GridGroups(grid)


class GridGroups:
    """Ranks, sizes and process groups along the axes of a grid over all ranks.

    Of tensor-parallel groups, of pipelines, of ranks with the same part of the model and other samples (data), of ranks
    that share a sequence (context, or sequence), of one replica of the model, of ranks that experts are divided among,
    and of those with the same experts: `..._rank` is this rank's place in its group, `..._world_size` how many it has,
    `..._src_rank` the first of them;
    `with_context_parallel=True` adds the ranks along cp. A group is made when it is first asked for, of all ranks at
    once: a collective, so all of them must ask. That of the embedding is None for a stage between the first and the
    last. Raises ValueError where the grid has another number of ranks than the default process group.
    """

    def __init__(self, grid: Grid) -> None:
        if grid.world != dist.get_world_size():
            raise ValueError(f"grid: got one of {grid.world} ranks; there are {dist.get_world_size()}")
        self.grid = grid
        self._made: dict[tuple[str, ...], weakref.ref[dist.ProcessGroup] | None] = {}

    def _ranks(self, *axes: str, with_context_parallel: bool = False) -> tuple[int, ...]:
        return self.grid.ranks((*axes, *("cp",) * with_context_parallel), dist.get_rank())

    def _size(self, *axes: str, with_context_parallel: bool = False) -> int:
        return len(self._ranks(*axes, with_context_parallel=with_context_parallel))

    def _rank(self, *axes: str, with_context_parallel: bool = False) -> int:
        return self._ranks(*axes, with_context_parallel=with_context_parallel).index(dist.get_rank())

    def _src_rank(self, *axes: str) -> int:
        return self._ranks(*axes)[0]

    def _group(self, *axes: str, with_context_parallel: bool = False) -> dist.ProcessGroup | None:
        if with_context_parallel and self.grid.size("cp") > 1:
            axes += ("cp",)
        if axes not in self._made:
            group, ranks = dist.group.WORLD, self._ranks(*axes)
            if len(ranks) < self.grid.world:  # none between the first and the last stage
                group = group_of_members(f"mpu {axes}", ranks) if ranks else None
            self._made[axes] = group and weakref.ref(group)
        return alive(self._made[axes])

    if TYPE_CHECKING:  # the names from the table below
        __getattr__: Callable[[str], Callable[..., Any]]

    get_tensor_model_parallel_src_rank = partialmethod(_src_rank, "tp")
    get_data_parallel_src_rank = partialmethod(_src_rank, *DATA)
    get_model_parallel_src_rank = partialmethod(_src_rank, "mp")
    get_embedding_group = partialmethod(_group, "embedding")


# What Megatron and DeepSpeed call the axes in get_..._parallel_rank, _world_size and _group.
_AXES = {
    "tensor_model": ("tp",),
    **dict.fromkeys(("pipeline_model", "pipe"), ("pp",)),
    "data": DATA,
    **dict.fromkeys(("context", "sequence"), ("cp",)),
    "model": ("mp",),
    "expert_model": ("ep",),
    "expert_data": ("dp_replicate", "efsdp"),
}
for _name, _axes in _AXES.items():
    for _what, _method in (("rank", "_rank"), ("world_size", "_size"), ("group", "_group")):
        setattr(GridGroups, f"get_{_name}_parallel_{_what}", partialmethod(getattr(GridGroups, _method), *_axes))
