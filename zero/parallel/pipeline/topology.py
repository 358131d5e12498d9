"""Ranks along the axes of a topology, by DeepSpeed's names."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Sequence
from functools import partialmethod
from typing import Any

import torch.distributed as dist

from zero.parallel.grid_groups import GridGroups
from zero.plan.grid import DATA, Grid


class ProcessTopology:
    """Ranks numbered along axes of these sizes, the last one fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord = namedtuple("ProcessCoord", self.axes)
        self._coords = [self.ProcessCoord(*place) for place in itertools.product(*map(range, dims))]

    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._coords)

    def get_axis_names(self) -> list[str]:
        """The axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The size along an axis, 0 where there is none of this name."""
        return dict(zip(self.axes, self.dims, strict=True)).get(axis, 0)

    def get_coord(self, rank: int) -> Any:
        """The places of a rank along the axes, which are attributes."""
        return self._coords[rank]

    def get_rank(self, **places: int) -> int:
        """The rank at these places along all axes."""
        if places.keys() != {*self.axes}:
            raise ValueError(f"get_rank(): got places along {', '.join(places)}; wanted {', '.join(self.axes)}")
        return self._coords.index(self.ProcessCoord(**places))

    def filter_match(self, **places: int) -> list[int]:
        """The ranks at these places along some axes."""
        wanted = places.items()
        return [rank for rank, each in enumerate(self._coords) if wanted <= each._asdict().items()]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at one place along an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups along an axis, of which there are none along one that is not there."""
        if axis not in self.axes:
            return []
        first = self.filter_match(**{axis: 0})
        beside = [{name: at for name, at in self._coords[rank]._asdict().items() if name != axis} for rank in first]
        return [self.filter_match(**places) for places in beside]

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """The places of a rank as a text for names of files."""
        places = self._coords[rank]._asdict().items()
        return outer_sep.join(f"{axis}{inner_sep}{at:02d}" for axis, at in places if axis not in omit_axes)


class PipeDataParallelTopology(ProcessTopology):
    """Stages of pipelines, and replicas of each."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages of pipelines, replicas of each, and parts of their layers."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid(GridGroups):
    """The groups of a topology of `pipe`, `data` and `model`, in this order; see `GridGroups` for how they are made.

    Without a topology the prime factors of the number of ranks go to stages and replicas by turns. The model-parallel
    ranks are those of a replica, the slice-parallel ones those of a stage of it.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: dist.ProcessGroup | None = None) -> None:
        world = dist.get_world_size(process_group)
        if topology is None:
            stages = 1
            for prime in _prime_factors(world)[::2]:
                stages *= prime
            topology = PipeDataParallelTopology(stages, world // stages)
        axes = [axis for axis in ("pipe", "data", "model") if axis in topology.axes]
        if topology.axes != axes or topology.world_size() != world:
            said = f"got axes {topology.axes} of sizes {topology.dims}; there are {world} ranks"
            raise ValueError(f"PipelineParallelGrid: {said}, and axes are pipe, data and model, in this order")
        sizes = {"pp": topology.get_dim("pipe") or 1, "tp": topology.get_dim("model") or 1}
        super().__init__(Grid(world, sizes))
        self._topo, self.global_rank, self.world_size = topology, dist.get_rank(), world
        self.pp_group, self.dp_group = [*self._ranks("pp")], [*self._ranks(*DATA)]
        self.is_first_stage = self.get_stage_id() == 0
        self.is_last_stage = self.get_stage_id() == sizes["pp"] - 1

    get_stage_id = partialmethod(GridGroups._rank, "pp")
    get_data_parallel_id = partialmethod(GridGroups._rank, *DATA)
    get_slice_parallel_rank = partialmethod(GridGroups._rank, "tp")
    get_slice_parallel_world_size = partialmethod(GridGroups._size, "tp")
    get_slice_parallel_group = partialmethod(GridGroups._group, "tp")

    def stage_to_global(self, stage_id: int, **places: int) -> int:
        """The rank that has a stage of this rank's pipeline, or of the one at other places along the other axes."""
        return self._topo.get_rank(**{**self._topo.get_coord(self.global_rank)._asdict(), **places, "pipe": stage_id})

    def _is_grid_valid(self) -> bool:
        return True  # else there were none


def _prime_factors(number: int) -> list[int]:
    if number < 1:
        raise ValueError(f"prime factors of {number}: wanted at least 1")
    for prime in range(2, number + 1):
        if number % prime == 0:
            return [prime, *_prime_factors(number // prime)]
    return []
