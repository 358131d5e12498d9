"""The promise: topologies number ranks as DeepSpeed's do, and their groups are those of the grid."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zero.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from zero.plan.grid import DATA, Grid

SIZES = [(1, 1, 1), (2, 3, 1), (4, 2, 2), (3, 1, 4)]


@pytest.mark.parametrize(("pipe", "data", "model"), SIZES)
def test_a_topology_has_the_ranks_of_the_grid(pipe, data, model):
    topology = PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=data)
    grid = Grid(pipe * data * model, {"pp": pipe, "tp": model})
    assert (topology.world_size(), topology.get_axis_names()) == (grid.world, ["pipe", "data", "model"])
    assert [topology.get_dim(axis) for axis in ("pipe", "data", "model", "other")] == [pipe, data, model, 0]
    for axis, axes in (("pipe", ("pp",)), ("data", DATA), ("model", ("tp",))):
        assert sorted(map(tuple, topology.get_axis_comm_lists(axis))) == sorted(grid.lists(*axes))
    for rank, place in enumerate(itertools.product(range(pipe), range(data), range(model))):
        assert topology.get_coord(rank) == place == topology.ProcessCoord(*place)
        assert topology.get_rank(pipe=place[0], data=place[1], model=place[2]) == rank
        assert topology.filter_match(pipe=place[0], data=place[1], model=place[2]) == [rank]
        assert rank in topology.get_axis_list("data", place[1])
        assert topology.get_rank_repr(rank) == f"model_{place[2]:02d}"
        assert topology.get_rank_repr(rank, [], "=", ",") == "pipe={:02d},data={:02d},model={:02d}".format(*place)


def test_axes_of_other_names():
    topology = ProcessTopology(["row", "col"], [2, 3])
    assert topology.get_axis_list("col", 1) == topology.filter_match(col=1) == [1, 4]
    assert topology.get_axis_comm_lists("other") == []
    with pytest.raises(ValueError, match=r"got places along row; wanted row, col"):
        topology.get_rank(row=1)


def sums(axes: list[str], dims: list[int]) -> list[Any]:
    grid = PipelineParallelGrid(ProcessTopology(axes, dims))
    said: list[Any] = [grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_slice_parallel_rank()]
    said += [grid.is_first_stage, grid.is_last_stage, [grid.stage_to_global(at) for at in range(dims[0])]]
    for name in ("pipe", "data", "slice", "model"):
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=getattr(grid, f"get_{name}_parallel_group")())
        said.append((int(total), getattr(grid, f"get_{name}_parallel_world_size")()))
    return said


def test_groups_of_ranks(pool: Any):
    found = pool.run(4, sums, ["pipe", "data"], [2, 2])
    assert found[1] == [0, 1, 0, True, False, [1, 3], (4, 2), (1, 2), (1, 1), (4, 2)]
    assert found[2] == [1, 0, 0, False, True, [0, 2], (2, 2), (5, 2), (2, 1), (2, 2)]
    found = pool.run(4, sums, ["pipe", "model"], [2, 2])
    assert found[3] == [1, 0, 1, False, True, [1, 3], (4, 2), (3, 1), (5, 2), (6, 4)]


def grids() -> list[Any]:
    said: list[Any] = [PipelineParallelGrid().get_pipe_parallel_world_size()]
    for axes in (["data", "pipe"], ["pipe", "row"]):
        with pytest.raises(ValueError, match="axes are pipe, data and model, in this order"):
            PipelineParallelGrid(ProcessTopology(axes, [2, 2]))
    for sizes in ((3, 2), (2, 4)):
        with pytest.raises(ValueError, match="there are 4 ranks"):
            PipelineParallelGrid(PipeDataParallelTopology(*sizes))
    return said


def test_a_grid_without_a_topology_and_what_is_wrong(pool: Any):
    assert pool.run(4, grids)[0] == [2]
