"""The grid of ranks: the groups that Megatron's users know, for any sizes, and the command that prints them."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest
import torch
import torch.distributed as dist

from zero.__main__ import main
from zero.compat.mpu import GridGroups
from zero.plan.grid import AXES, DATA, Grid, GridError


def refused_groups() -> str:
    with pytest.raises(ValueError) as error:
        GridGroups(Grid(4))
    return str(error.value)


KNOWN = [(16, 2, 4), (192, 8, 8), (160, 8, 4)]


@pytest.mark.parametrize(("world", "tp", "pp"), KNOWN)
def test_groups_are_those_of_megatron(world, tp, pp):
    grid, start = Grid(world, {"tp": tp, "pp": pp}), time.perf_counter()
    per_stage = world // pp
    assert grid.lists("tp") == [tuple(range(at, at + tp)) for at in range(0, world, tp)]
    assert grid.lists("pp") == [tuple(range(at, world, per_stage)) for at in range(per_stage)]
    assert grid.lists(*DATA) == [
        tuple(range(block + place, block + per_stage, tp))
        for block in range(0, world, per_stage)
        for place in range(tp)
    ]
    assert grid.lists("pp", "tp") == [
        tuple(rank for rank in range(world) if rank % per_stage // tp == replica) for replica in range(per_stage // tp)
    ]
    assert grid.embedding() == [(at, at + world - per_stage) for at in range(per_stage)]
    assert time.perf_counter() - start < 1.0


def test_any_grid_is_parted_by_the_groups_of_any_axes():
    chance = random.Random(0)
    for _ in range(60):
        sizes = {axis: chance.choice([1, 1, 2, 3, 4]) for axis in AXES}
        grid = Grid(math.prod(sizes.values()), sizes)
        axes = chance.sample(AXES, chance.randint(1, len(AXES)))
        lists = grid.lists(*axes)
        assert sorted(itertools.chain(*lists)) == list(range(grid.world))
        assert {len(ranks) for ranks in lists} == {grid.size(*axes)}
        assert [ranks[0] for ranks in lists] == sorted(ranks[0] for ranks in lists)
        for ranks in lists:
            assert list(ranks) == sorted(ranks)
            assert all(grid.ranks(axes, rank) == ranks for rank in ranks)
            for axis in set(AXES) - set(axes):  # the others stand still
                assert len({grid.ranks(axis, rank).index(rank) for rank in ranks}) == 1


@pytest.mark.parametrize(
    ("world", "sizes", "text"),
    [
        (16, {"tp": 3}, "tp 3 = 3 does not divide the 16 ranks there are"),
        (16, {"tp": 4, "pp": 8}, "pp 8 x tp 4 = 32 does not divide the 16 ranks there are"),
        (16, {"dp_shard": 4, "tp": 2}, "dp_shard 4 x tp 2 = 8 ranks, but there are 16"),
        (16, {"dp": 4}, "no axis is called 'dp'; there are pp, dp_replicate, dp_shard, cp, tp"),
        (16, {"tp": 0}, "tp: got 0, wanted an integer of at least 1"),
        (True, {}, "world: got True, wanted an integer of at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_product(world, sizes, text):
    with pytest.raises(GridError) as error:
        Grid(world, sizes)
    assert str(error.value) == text
    with pytest.raises(GridError, match="rank: got 4, wanted one of 0 to 3"):
        Grid(4).ranks("tp", 4)


def test_odd_grids_are_warned_of_and_work():
    (odd,) = Grid(160, {"tp": 8, "pp": 4}).warnings(8)
    assert odd.startswith("dp is 5, not a power of two")
    (crossing,) = Grid(16, {"tp": 8}).warnings(4)
    assert crossing.startswith("tp is 8 with 4 ranks on each host: 2 of its groups cross hosts, the first with ranks 0")
    assert Grid(16, {"tp": 2, "pp": 4}).warnings(8) == []


def test_the_command_prints_the_groups(capsys):
    assert main(["plan", "--world", "16", "--tp", "2", "--pp", "4", "--groups"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "16 ranks: pp 4 x dp_shard 2 x tp 2"
    assert lines[1] == "tensor parallel (tp): 8 of 2"
    assert lines[2] == "  [0, 1] [2, 3] [4, 5] [6, 7] [8, 9] [10, 11] [12, 13] [14, 15]"
    assert "  [0, 4, 8, 12] [1, 5, 9, 13] [2, 6, 10, 14] [3, 7, 11, 15]" in lines
    assert "  [0, 2] [1, 3] [4, 6] [5, 7] [8, 10] [9, 11] [12, 14] [13, 15]" in lines
    assert "  [0, 1, 4, 5, 8, 9, 12, 13] [2, 3, 6, 7, 10, 11, 14, 15]" in lines
    assert "  [0, 12] [1, 13] [2, 14] [3, 15]" in lines
    assert main(["plan", "--world", "160", "--tp", "8", "--pp", "4", "--groups"]) == 0
    assert "zero plan: warning: dp is 5" in capsys.readouterr().err


def asked_of_groups() -> list:
    """Per kind: what a rank is told, and the sum of the global ranks along the group."""
    groups = GridGroups(Grid(4, {"tp": 2}))
    found = []
    for kind in ("tensor_model", "pipe", "data", "sequence", "model"):
        rank, size = (getattr(groups, f"get_{kind}_parallel_{what}")() for what in ("rank", "world_size"))
        total = torch.tensor(dist.get_rank())
        group = getattr(groups, f"get_{kind}_parallel_group")()
        dist.all_reduce(total, group=group)
        found.append((rank, size, int(total), group is getattr(groups, f"get_{kind}_parallel_group")()))
    return found


def test_groups_by_the_names_of_megatron(pool):
    for rank, found in enumerate(pool.run(4, asked_of_groups)):
        tp, data = rank % 2, rank // 2
        pair = 4 * (rank // 2) + 1
        assert found == [(tp, 2, pair, True), (0, 1, rank, True), (data, 2, 2 + 2 * tp, True), (0, 1, rank, True),
                         (tp, 2, pair, True)]  # fmt: skip


def test_groups_of_another_number_of_ranks_are_refused(pool):
    assert pool.run(2, refused_groups) == ["grid: got one of 4 ranks; there are 2"] * 2
