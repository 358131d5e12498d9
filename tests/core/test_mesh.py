"""The mesh: which ranks lie along which axis, what its collectives bring, which backend is asked."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zero.core import comm
from zero.core.mesh import Mesh, Meshes, mesh_of_one
from zero.core.world import Axis, backend_of, group_of_members, make_world, slow_backend
from zero.log import logger
from zero.plan.sharding import Sharding

SHAPES = [(4, 1), (2, 2), (1, 4)]


def make_mesh(sharding: Sharding, timeout: float, group: Any = None, **sizes: int) -> Mesh:
    """The mesh of dense units over a group."""
    return Meshes(make_world(timeout, group=group), sharding, timeout=timeout, **sizes).of()


def _axes(mesh: Mesh) -> dict[str, tuple[int, ...] | None]:
    names = ("shard", "replica", "data", "secondary", "across")
    return {name: axis and axis.ranks for name in names for axis in [getattr(mesh, name)]}


def meshes(stage: int) -> list[tuple]:
    """Per shape of 4 ranks: the global ranks along each axis, this rank's place and span, and the order of spans."""
    found = []
    for shard, _ in SHAPES:
        mesh = make_mesh(Sharding.of_stage(stage), 60.0, shard_size=shard)
        places = (mesh.shard.rank, mesh.replica.rank, mesh.data.rank, mesh.span, mesh.data.global_rank)
        found.append((_axes(mesh), places, mesh.by_span(torch.arange(mesh.data.size)).tolist()))
        mesh.data.watchdog.close()
    for axis in (mesh.shard, mesh.replica):
        if axis.group not in (None, dist.group.WORLD):
            with pytest.raises(ValueError):  # destroyed with the engine it was made for
                dist.get_rank(axis.group)
    return found


def test_axes_hold_consecutive_ranks_and_their_counterparts(pool):
    for rank, (full, pairs, single) in enumerate(pool.run(4, meshes, 3)):
        everyone = (0, 1, 2, 3)
        none = {"secondary": None, "across": None}
        assert full[0] == {"shard": everyone, "replica": (rank,), "data": everyone, **none}
        assert single[0] == {"shard": (rank,), "replica": everyone, "data": everyone, **none}
        base, place = rank // 2 * 2, rank % 2
        assert pairs[0] == {"shard": (base, base + 1), "replica": (place, place + 2), "data": everyone, **none}
        assert pairs[1] == (place, rank // 2, rank, place * 2 + rank // 2, rank)
        assert pairs[2] == [0, 2, 1, 3]
        assert full[1] == (rank, 0, rank, rank, rank)
        assert single[1] == (0, rank, rank, rank, rank)


@pytest.mark.ranks(2)
def test_without_cut_state_there_is_no_shard_axis():
    found = []
    for shard in (0, 2):
        mesh = make_mesh(Sharding.of_stage(0), 60.0, shard_size=shard)
        found.append((mesh.shard.size, mesh.replica.size))
        mesh.data.watchdog.close()
    assert found == [(1, 2)] * 2


def exchanged() -> list:
    """Gather, scatter, broadcast and gather_scalars along each axis of a (2, 2) mesh."""
    mesh = make_mesh(Sharding.of_stage(3), 60.0, shard_size=2)
    found = []
    for axis in (mesh.shard, mesh.replica, mesh.data):
        full = torch.zeros(axis.size, 3)
        full[axis.rank] = mesh.data.global_rank
        comm.gather(full.view(-1), axis, 3).wait()
        total = torch.empty(3)
        comm.scatter(torch.full((axis.size * 3,), float(mesh.data.global_rank + 1)), axis, 4).sum(total, False)
        sent = torch.tensor([mesh.data.global_rank])
        comm.broadcast(sent, axis.size - 1, axis)
        rows = comm.gather_scalars(torch.tensor([mesh.data.global_rank]), axis)
        found.append((full[:, 0].tolist(), total[0].item(), sent.item(), rows.flatten().tolist(), axis.ranks))
    mesh.data.watchdog.close()
    return found


def test_collectives_work_along_groups_inside_the_world(pool):
    for found in pool.run(4, exchanged):
        for gathered, total, sent, rows, ranks in found:
            assert gathered == rows == list(ranks)
            assert total == sum(rank + 1 for rank in ranks)
            assert sent == ranks[-1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_reduction_around_the_size_of_a_message(extra):
    """A reduction that needs several messages per peer gives the sum in the order of ranks."""
    mesh = make_mesh(Sharding.of_stage(3), 60.0)
    numel = comm.PIECE + extra
    rows = [torch.randn(2, numel, generator=torch.Generator().manual_seed(rank)) for rank in range(mesh.shard.size)]
    total = torch.empty(numel)
    comm.scatter(rows[mesh.shard.rank].view(-1), mesh.shard, 5).sum(total, False)
    mesh.data.watchdog.close()
    assert torch.equal(total, rows[0][mesh.shard.rank] + rows[1][mesh.shard.rank])


def two_steps(native: bool) -> tuple:
    """hpZ on 2 nodes of 2: slices between the nodes first, then rows of slices inside the node."""
    mesh = make_mesh(Sharding.of_stage(3), 60.0, secondary_size=2)
    secondary, across = mesh.secondary, mesh.across
    own = torch.arange(6.0) + 10 * mesh.data.rank
    held = torch.zeros(across.size, 6)
    held[across.rank] = own
    comm.gather(held.view(-1), across, 0).wait()
    full = torch.full((4, 6), -1.0)
    full.view(2, 2, 6)[:, secondary.rank] = held
    inside = Axis(secondary.group, 2, secondary.rank, native, secondary.watchdog, secondary.ranks)
    comm.gather(full.view(-1), inside, 3, rows=2).wait()
    mesh.data.watchdog.close()
    return full, _axes(mesh)


@pytest.mark.parametrize("native", [False, True])
def test_two_gathers_bring_what_one_over_all_ranks_brings(pool, native):
    wanted = torch.arange(6.0) + 10 * torch.arange(4)[:, None]
    for rank, (full, axes) in enumerate(pool.run(4, two_steps, native)):
        assert torch.equal(full, wanted)
        base, place = rank // 2 * 2, rank % 2
        assert axes["shard"] == axes["data"] == (0, 1, 2, 3)
        assert (axes["secondary"], axes["across"]) == ((base, base + 1), (place, place + 2))


def inside_a_group() -> tuple:
    """A mesh over a group that is not all of the world, with groups inside of it."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[dist.get_rank() % 2]
    mesh = make_mesh(Sharding.of_stage(3), 60.0, group=own)
    gathered = comm.gather_scalars(torch.tensor([mesh.data.global_rank]), mesh.data).flatten().tolist()
    mesh.data.watchdog.close()
    return _axes(mesh), gathered, mesh.data.global_rank


def test_ranks_of_a_group_are_named_by_their_global_numbers(pool):
    for rank, (axes, gathered, own) in enumerate(pool.run(4, inside_a_group)):
        group = (0, 2) if rank % 2 == 0 else (1, 3)
        assert axes["shard"] == axes["data"] == group
        assert gathered == list(group)
        assert own == rank


def bound_to_a_device() -> tuple:
    """A mesh whose groups its ranks make; to what the default group was bound when torch made them."""
    world, own, new_group = dist.group.WORLD, dist.new_group([0, 1, 2, 3]), dist.new_group
    world.bound_device_id = device = torch.device("cuda", 1)
    bound = []

    def noted(*args: Any, **options: Any) -> dist.ProcessGroup:
        bound.append(world.bound_device_id)
        return new_group(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noted)
        try:
            mesh = make_mesh(Sharding.of_stage(3), 60.0, group=own, shard_size=2)
            mesh.data.watchdog.close()
            if dist.get_rank() % 2 == 0:
                assert dist.get_process_group_ranks(group_of_members([0, 2])) == [0, 2]
            assert world.bound_device_id == device
        finally:
            world.bound_device_id = None
    return _axes(mesh), bound


def test_ranks_make_groups_without_others_where_the_default_group_is_bound_to_a_device(pool):
    """It is with NCCL, where torch would then split its communicator, and wait for all of its ranks."""
    for rank, (axes, bound) in enumerate(pool.run(4, bound_to_a_device)):
        base, place = rank // 2 * 2, rank % 2
        assert bound == [None] * (2 + (place == 0))
        assert (axes["shard"], axes["replica"]) == ((base, base + 1), (place, place + 2))


def test_a_mesh_of_one_has_three_axes_of_one():
    assert _axes(mesh_of_one()) == {"shard": (0,), "replica": (0,), "data": (0,), "secondary": None, "across": None}


def backends() -> list[str]:
    dist.destroy_process_group()
    found = []
    for name in ("gloo", "cpu:gloo,xpu:gloo", None):
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
        found += [backend_of(dist.group.WORLD, torch.device(device)) for device in ("cpu", "cuda", "xpu")]
        dist.destroy_process_group()
    return found


def test_the_backend_is_asked_per_device(pool):
    (found,) = pool.run(1, backends)
    named, several, unnamed = found[:3], found[3:6], found[6:]
    assert named[:2] == ["gloo", "gloo"]
    assert several == ["gloo", "", "gloo"]
    assert unnamed[0] == "gloo"


def test_a_slow_backend_is_said_with_its_cost():
    text = slow_backend(torch.device("cuda"), "gloo")
    assert "the process group sends over gloo" in text
    assert "copied to host memory" in text


def warned_of() -> list[str]:
    """What two meshes on a stand-in for a GPU log, whose messages gloo sends."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero.core.world.local_device", lambda: torch.device("xpu"))
        for _ in range(2):
            make_mesh(Sharding.of_stage(3), 60.0).data.watchdog.close()
    logger.removeHandler(handler)
    return lines


def test_a_slow_backend_is_warned_of_once(pool):
    first, second = pool.run(2, warned_of)
    assert len(first) == 1
    assert first[0].startswith("the model is on xpu and the process group sends over no backend of that device")
    assert second == []
