"""The grid of ranks: the groups that Megatron's users know, for any sizes, and the command that prints them."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections import UserList

import pytest
import torch
import torch.distributed as dist
from models import Net, config

import zero
from zero.__main__ import main
from zero.parallel.grid_groups import GridGroups
from zero.plan.grid import AXES, DATA, EXPERT_AXES, Grid, GridError

KNOWN = [(16, 2, 4), (192, 8, 8), (128, 8, 8), (64, 8, 8), (160, 8, 4), (224, 8, 4), (96, 8, 4), (4096, 8, 8)]


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
    assert (
        grid.lists("mp")
        == grid.lists("pp", "tp")
        == [
            tuple(rank for rank in range(world) if rank % per_stage // tp == replica)
            for replica in range(per_stage // tp)
        ]
    )
    assert grid.lists("embedding") == [(at, at + world - per_stage) for at in range(per_stage)]
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(("world", "tp", "pp"), KNOWN)
def test_the_facade_gives_the_same_groups(monkeypatch, world, tp, pp):
    """On ranks of all places, without processes: a group is a list of its ranks, and None that of all."""
    grid = Grid(world, {"tp": tp, "pp": pp})
    kinds = {"tensor_model": ("tp",), "pipeline_model": ("pp",), "pipe": ("pp",), "data": DATA, "model": ("pp", "tp")}
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    alive: list[UserList[int]] = []  # as torch keeps its groups
    made = "zero.parallel.grid_groups.group_of_members"
    monkeypatch.setattr(made, lambda name, ranks: alive.append(UserList(ranks)) or alive[-1])
    for rank in range(world) if world == 16 else (0, 1, world // 2 + 3, world - 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        groups, start = zero.groups({"tp_size": tp, "pp": pp}), time.perf_counter()
        for kind, axes in kinds.items():
            (own,) = [ranks for ranks in grid.lists(*axes) if rank in ranks]
            asked = [getattr(groups, f"get_{kind}_parallel_{what}")() for what in ("group", "world_size", "rank")]
            assert asked == [list(own) if len(own) < world else None, len(own), own.index(rank)]
        pipe = groups.get_pipe_parallel_group()
        assert groups.get_embedding_group() == ([pipe[0], pipe[-1]] if rank in (pipe[0], pipe[-1]) else None)
        assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(("world", "tp", "cp", "pp"), [(16, 2, 2, 2), (96, 4, 2, 3), (192, 4, 2, 8), (192, 8, 3, 4)])
def test_the_facade_gives_those_of_megatron_with_contexts(monkeypatch, world, tp, cp, pp):
    """Its loops, of `initialize_model_parallel`: contexts lie between tensor and data parallelism."""
    stages = [range(start, start + world // pp) for start in range(0, world, world // pp)]
    replicas = [range(start, start + tp * cp) for start in range(0, world, tp * cp)]
    wanted = {
        "tensor_model": [range(at, at + tp) for at in range(0, world, tp)],
        "context": [replica[place::tp] for replica in replicas for place in range(tp)],
        "pipeline_model": [range(at, world, world // pp) for at in range(world // pp)],
        "data": [stage[place :: tp * cp] for stage in stages for place in range(tp * cp)],
    }
    whole = [stage[place::tp] for stage in stages for place in range(tp)]
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    alive: list[UserList[int]] = []  # as torch keeps its groups
    made = "zero.parallel.grid_groups.group_of_members"
    monkeypatch.setattr(made, lambda name, ranks: alive.append(UserList(ranks)) or alive[-1])
    for rank in range(0, world, 5):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        groups = zero.groups({"tp": tp, "cp": cp, "pp": pp})
        for kind, lists in wanted.items():
            (own,) = [list(ranks) for ranks in lists if rank in ranks]
            assert getattr(groups, f"get_{kind}_parallel_group")() == own
            assert getattr(groups, f"get_{kind}_parallel_rank")() == own.index(rank)
        (own,) = [list(ranks) for ranks in whole if rank in ranks]
        assert groups.get_data_parallel_group(with_context_parallel=True) == own


def test_experts_are_a_second_reading_of_the_same_ranks():
    """As torchtitan's sparse mesh: efsdp x ep in place of dp_shard x cp x tp, ep innermost."""
    chance = random.Random(1)
    for _ in range(40):
        sizes = {axis: chance.choice([1, 2, 2, 3]) for axis in AXES}
        folded = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        ep = chance.choice([each for each in range(1, folded + 1) if folded % each == 0])
        grid = Grid(math.prod(sizes.values()), sizes, ep=ep)
        assert grid.size("efsdp") * grid.size("ep") == grid.size("dp_shard", "cp", "tp") == folded
        mesh = torch.arange(grid.world).view(sizes["pp"], sizes["dp_replicate"], folded // ep, ep)
        assert grid.lists("ep") == [tuple(ranks) for ranks in mesh.flatten(0, 2).tolist()]
        assert grid.lists("efsdp") == [tuple(ranks) for ranks in mesh.transpose(2, 3).flatten(0, 2).tolist()]
        assert grid.lists("dp_replicate", "efsdp") == [
            tuple(ranks) for ranks in mesh.permute(0, 3, 1, 2).flatten(2).flatten(0, 1).tolist()
        ]
        assert grid.lists(*EXPERT_AXES) == grid.lists(*AXES) == [tuple(range(grid.world))]
    for axes in (("tp", "ep"), ("nowhere",), ("embedding", "tp")):
        with pytest.raises(GridError, match=f"^no groups are along {', '.join(axes)}; axes are"):
            grid.lists(*axes)


def test_words_of_accelerate_are_those_of_axes():
    words = {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2, "cp_size": 2}
    grid = Grid(16, {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 2})
    assert Grid(16, words) == grid == Grid(16, {**words, "sp_size": 2, "sp": 2})
    with pytest.raises(GridError) as error:
        Grid(16, {"cp_size": 2, "sp": 4})
    assert str(error.value) == "cp: got 2 and, as sp, 4, for one axis; keep one of the two"


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
        (16, {"tp": 3}, "tp 3 = 3 does not divide the 16 ranks there are; nearest that fit: tp 2 or tp 4"),
        (12, {"pp_size": 5}, "pp 5 = 5 does not divide the 12 ranks there are; nearest that fit: pp 4 or pp 6"),
        (
            16,
            {"tp": 4, "pp": 8},
            "pp 8 x tp 4 = 32 does not divide the 16 ranks there are; nearest that fit: tp 4 x pp 4",
        ),
        (
            16,
            {"dp_shard": 4, "tp": 2},
            "dp_shard 4 x tp 2 = 8 ranks, but there are 16; nearest that fit: tp 2 x dp_shard 8",
        ),
        (16, {"dp": 4}, "no axis is called 'dp'; there are pp, dp_replicate, dp_shard, cp, tp"),
        (16, {"ep": 4}, "no axis is called 'ep'; there are pp, dp_replicate, dp_shard, cp, tp"),
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
    with pytest.raises(
        GridError, match=r"^ep 3 does not divide dp_shard x cp x tp = 8; nearest that fit: ep 2 or ep 4"
    ):
        Grid(16, {"pp": 2}, ep=3)


def test_odd_grids_are_warned_of_and_work():
    (odd,) = Grid(160, {"tp": 8, "pp": 4}).warnings(8)
    assert odd.startswith("dp is 5, not a power of two")
    (crossing,) = Grid(16, {"tp": 8}).warnings(4)
    assert crossing.startswith("tp is 8 with 4 ranks on each host: 2 of its groups cross hosts, the first with ranks 0")
    assert Grid(16, {"tp": 2, "pp": 4}).warnings(8) == []
    heads, layers = Grid(30, {"tp": 5, "pp": 3}).warnings(30)
    assert heads.startswith("tp is 5, an odd number") and layers.startswith("pp is 3, an odd number")


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
    assert main(["plan", "--world", "8", "--sp", "2", "--tp", "2", "--ep", "4", "--groups"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 ranks: dp_shard 2 x cp 2 x tp 2"
    assert lines[lines.index("context parallel (cp): 4 of 2") + 1] == "  [0, 2] [1, 3] [4, 6] [5, 7]"
    assert lines[lines.index("data and context parallel (dp x cp): 2 of 4") + 1] == "  [0, 2, 4, 6] [1, 3, 5, 7]"
    assert lines[-3:] == ["  [0, 1, 2, 3] [4, 5, 6, 7]", "shards of an expert's state (efsdp): 4 of 2",
                          "  [0, 4] [1, 5] [2, 6] [3, 7]"]  # fmt: skip


class Placed(Net):
    """A model of which ranks may share sequences: it is told the positions."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, position_ids: torch.Tensor | None = None):
        return super().forward(tokens, targets)


def grid_of_an_engine(json: dict) -> Grid:
    engine = zero.initialize(model=Placed(), config=json)[0]
    groups = zero.groups(engine)
    assert groups.get_data_parallel_world_size() == engine._config.world_size
    engine.destroy()
    return groups.grid


@pytest.mark.parametrize(
    ("stage", "more", "said"),
    [
        (0, {}, "dp_replicate 4"),
        (2, {}, "dp_shard 4"),
        (3, {"zero": {"shard_size": 2}}, "dp_replicate 2 x dp_shard 2"),
        (3, {"sequence_parallel_size": 2}, "dp_shard 2 x cp 2"),
        (1, {"sequence_parallel_size": 2, "zero": {"shard_size": 2}}, "dp_replicate 2 x cp 2"),
    ],
)
def test_the_command_says_the_grid_that_an_engine_with_this_json_has(pool, capsys, tmp_path, stage, more, said):
    path, values = tmp_path / "zero.json", config(stage, 4 // more.get("sequence_parallel_size", 1), **more)
    path.write_text(json.dumps(values))
    assert main(["plan", "--world", "4", "--groups", "--config", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"4 ranks: {said}\n")
    grids = pool.run(4, grid_of_an_engine, values)
    assert [" x ".join(f"{axis} {grid.size(axis)}" for axis in AXES if grid.size(axis) > 1) for grid in grids] == [
        said
    ] * 4
    assert main(["plan", "--world", "4", "--dp-replicate", "3", "--groups", "--config", str(path)]) == 2
    assert "zero plan: error: --dp-replicate: got 3, but" in capsys.readouterr().err


def asked_of_groups() -> list:
    """Per kind: what a rank is told, and the sum of the global ranks along the group."""
    groups = zero.groups({"tp": 2})
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


@pytest.mark.ranks(4)
def test_ranks_of_one_sequence_and_of_experts_are_groups():
    rank, groups = dist.get_rank(), zero.groups({"sp_size": 2, "ep_size": 2})
    members = dist.get_process_group_ranks
    pair, across = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    assert members(groups.get_context_parallel_group()) == members(groups.get_expert_model_parallel_group()) == pair
    assert groups.get_sequence_parallel_group() is groups.get_context_parallel_group()
    assert (groups.get_context_parallel_rank(), groups.get_context_parallel_world_size()) == (rank % 2, 2)
    assert members(groups.get_data_parallel_group()) == members(groups.get_expert_data_parallel_group()) == across
    assert groups.get_data_parallel_group(with_context_parallel=True) is dist.group.WORLD
    assert groups.get_data_parallel_world_size(with_context_parallel=True) == 4
    assert groups.get_data_parallel_rank(with_context_parallel=True) == rank
    with pytest.raises(ValueError, match="grid: got one of 2 ranks; there are 4"):
        GridGroups(Grid(2))
    with pytest.raises(ValueError, match=r'groups\(\): got a Linear; wanted an engine, or sizes such as {"tp": 2}'):
        zero.groups(torch.nn.Linear(2, 2))
