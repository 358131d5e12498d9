"""The groups of a grid as Megatron and DeepSpeed name them: an object for arguments that are called `mpu`."""

from __future__ import annotations

import torch.distributed as dist

from zero.plan.grid import DATA, Grid

_KINDS = {"tensor_model": ("tp",), "pipe": ("pp",), "data": DATA, "sequence": ("cp",), "model": ("pp", "tp")}


class GridGroups:
    """Ranks, sizes and process groups along the axes of a grid over all ranks.

    A group is made when it is first asked for, of all ranks at once: a collective, so all of them must ask. Raises
    ValueError where the grid has another number of ranks than the default process group.
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

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's place among those of one tensor-parallel group."""
        return self._rank("tensor_model")

    def get_tensor_model_parallel_world_size(self) -> int:
        """Ranks of a tensor-parallel group."""
        return self._size("tensor_model")

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """The tensor-parallel group of this rank."""
        return self._group("tensor_model")

    def get_pipe_parallel_rank(self) -> int:
        """This rank's stage of the pipeline."""
        return self._rank("pipe")

    def get_pipe_parallel_world_size(self) -> int:
        """Stages of the pipeline."""
        return self._size("pipe")

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's pipeline."""
        return self._group("pipe")

    def get_data_parallel_rank(self) -> int:
        """This rank's place among those that have the same part of the model and other samples."""
        return self._rank("data")

    def get_data_parallel_world_size(self) -> int:
        """Ranks that have the same part of the model and other samples."""
        return self._size("data")

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that have the same part of the model and other samples."""
        return self._group("data")

    def get_sequence_parallel_rank(self) -> int:
        """Which part of a sequence this rank has."""
        return self._rank("sequence")

    def get_sequence_parallel_world_size(self) -> int:
        """Ranks that share a sequence."""
        return self._size("sequence")

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that this rank shares a sequence with."""
        return self._group("sequence")

    def get_model_parallel_rank(self) -> int:
        """This rank's place among those of one replica of the model."""
        return self._rank("model")

    def get_model_parallel_world_size(self) -> int:
        """Ranks of one replica of the model."""
        return self._size("model")

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's replica of the model."""
        return self._group("model")
