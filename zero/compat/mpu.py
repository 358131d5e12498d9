"""The groups of a grid as Megatron and DeepSpeed name them: an object for arguments that are called `mpu`."""

from __future__ import annotations

from functools import partialmethod

import torch.distributed as dist

from zero.plan.grid import DATA, Grid

_KINDS = {"tensor_model": ("tp",), "pipe": ("pp",), "data": DATA, "sequence": ("cp",), "model": ("pp", "tp")}


class GridGroups:
    """Ranks, sizes and process groups along the axes of a grid over all ranks.

    Of tensor-parallel groups, of pipelines, of ranks with the same part of the model and other samples (data), of ranks
    that share a sequence, and of one replica of the model: `..._rank` is this rank's place in its group,
    `..._world_size` how many it has. A group is made when it is first asked for, of all ranks at once: a collective, so
    all of them must ask. Raises ValueError where the grid has another number of ranks than the default process group.
    """

    def __init__(self, grid: Grid) -> None:
        if grid.world != dist.get_world_size():
            raise ValueError(f"grid: got one of {grid.world} ranks; there are {dist.get_world_size()}")
        self.grid = grid
        self._made: dict[str, dist.ProcessGroup] = {}

    def _ranks(self, kind: str) -> tuple[int, ...]:
        return self.grid.ranks(_KINDS[kind], dist.get_rank())

    def _size(self, kind: str) -> int:
        return self.grid.size(*_KINDS[kind])

    def _rank(self, kind: str) -> int:
        return self._ranks(kind).index(dist.get_rank())

    def _group(self, kind: str) -> dist.ProcessGroup:
        if kind not in self._made:
            lists = self.grid.lists(*_KINDS[kind])
            # Every rank makes every group, in one order.
            made = {ranks: dist.new_group(list(ranks)) for ranks in lists} if len(lists) > 1 else {}
            self._made[kind] = made.get(self._ranks(kind), dist.group.WORLD)
        return self._made[kind]

    get_tensor_model_parallel_rank = partialmethod(_rank, "tensor_model")
    get_tensor_model_parallel_world_size = partialmethod(_size, "tensor_model")
    get_tensor_model_parallel_group = partialmethod(_group, "tensor_model")
    get_pipe_parallel_rank = partialmethod(_rank, "pipe")
    get_pipe_parallel_world_size = partialmethod(_size, "pipe")
    get_pipe_parallel_group = partialmethod(_group, "pipe")
    get_data_parallel_rank = partialmethod(_rank, "data")
    get_data_parallel_world_size = partialmethod(_size, "data")
    get_data_parallel_group = partialmethod(_group, "data")
    get_sequence_parallel_rank = partialmethod(_rank, "sequence")
    get_sequence_parallel_world_size = partialmethod(_size, "sequence")
    get_sequence_parallel_group = partialmethod(_group, "sequence")
    get_model_parallel_rank = partialmethod(_rank, "model")
    get_model_parallel_world_size = partialmethod(_size, "model")
    get_model_parallel_group = partialmethod(_group, "model")
