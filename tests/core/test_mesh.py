"""The promise: ranks send each other whole sums in messages of any size, over the backend that their group has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import make_net, step
from scenario import settings
from torch import nn

import zero
from zero.core import comm
from zero.core.world import backend_of, make_world


class Row(nn.Module):
    """Its gradient is what its forward is given."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("extra", [-64, 0, 64])
def test_a_reduction_around_the_size_of_a_message(extra):
    """A reduction that needs several messages gives the sum in the order of ranks."""
    numel = 2 * (comm.PIECE + extra)
    rows = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    json = settings({"stage": 2, "optimizer": {"type": "SGD", "params": {"lr": 2.0}}}, 2)
    engine = zero.initialize(model=Row(numel), config=json)[0]
    engine.backward(engine(rows[dist.get_rank()].to(engine.device)))
    engine.step()
    engine.destroy()
    assert torch.equal(engine.module.weight, -(rows[0] + rows[1]))


@pytest.mark.ranks(4)
def test_ranks_make_groups_without_others_where_the_default_group_is_bound_to_a_device():
    """It is with NCCL, where torch would then split its communicator, and wait for all of its ranks.

    The groups go with the engine.
    """
    world, own, new_group, bound = dist.group.WORLD, dist.new_group([0, 1, 2, 3]), dist.new_group, []
    mpu, before = SimpleNamespace(get_data_parallel_group=lambda: own), len(dist.distributed_c10d._world.pg_map)
    world.bound_device_id = device = torch.device("cuda", 1)

    def noted(*args: Any, **options: Any) -> dist.ProcessGroup:
        bound.append(world.bound_device_id)
        return new_group(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noted)
        try:
            json = settings({"stage": 3, "zero": {"shard_size": 2}}, 4)
            engine = zero.initialize(model=make_net(), config=json, mpu=mpu)[0]
            assert world.bound_device_id == device
        finally:
            world.bound_device_id = None
    assert bound and set(bound) == {None}
    assert len(dist.distributed_c10d._world.pg_map) > before
    step(engine, 0)
    engine.destroy()
    assert len(dist.distributed_c10d._world.pg_map) == before


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


def warned_of() -> list[str]:
    """What two meshes on a stand-in for a GPU log, whose messages gloo sends."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero.core.world.local_device", lambda: torch.device("xpu"))
        patch.setattr("zero.log.logger.handle", lambda record: lines.append(record.getMessage()))
        for _ in range(2):
            make_world(60.0).watchdog.close()
    return lines


def test_a_slow_backend_is_warned_of_once_with_its_cost(pool):
    first, _ = pool.run(2, warned_of)
    (line,) = first
    assert line.startswith("the model is on xpu and the process group sends over no backend of that device")
    assert "copied to host memory" in line
