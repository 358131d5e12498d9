"""The promise: each unit has a mesh of its own, and where its ranks lie changes no bit.

One block is cut over all four ranks, one over neighbours, one over ranks that are no neighbours, and the rest is
repeated on all. Under the tree such a run has the bits of one whose units are all cut alike. Ranks send each other
whole sums, in messages of any size.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDE, make_net, share, step
from offload_cases import BOTH, OPTIMIZER
from scenario import Record, differences, scenario, settings
from torch import nn

import zero
from zero.core import comm
from zero.core.owner import share_along
from zero.core.world import make_world
from zero.plan.grid import UnitAxes
from zero.utils import safe_get_full_grad

ALL = UnitAxes(("dp_replicate", "dp_shard"), ())
PAIRS = UnitAxes(("dp_shard",), ("dp_replicate",))
ACROSS = UnitAxes(("dp_replicate",), ("dp_shard",))
WHOLE = UnitAxes((), ("dp_replicate", "dp_shard"))
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "muon_lr": 2e-2}}}
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}
TREE = {"reduce": "tree"}


def alike() -> torch.nn.Module:
    return make_net(width=WIDE)


def mixed() -> torch.nn.Module:
    net = alike()
    share_along(WHOLE, net.parameters())
    for block, axes in zip(net.blocks, (ALL, PAIRS, ACROSS), strict=True):
        share_along(axes, block.parameters())
    return net


def both(pool: Any, json: dict[str, Any], **more: Any) -> list[tuple[Record, Record]]:
    """The records of all ranks where units are cut alike, and where each has a mesh of its own."""
    one = scenario(pool, alike, {"zero": TREE, **json}, 4, state=True, **more)
    pairs = {"shard_size": 2} if json["stage"] else {}
    other = scenario(pool, mixed, {"zero": {**TREE, **pairs}, **json}, 4, state=True, **more)
    return list(zip(one, other, strict=True))


SHORT = [
    {"stage": 3, "cut": True, "gradient_clipping": 0.3, "accumulation": 2},
    {"stage": 1, **MUON},
]
LONG = [
    {"stage": 2, "precision": "bf16", "section": OPTIMIZER, "gradient_clipping": 0.3},
    {"stage": 3, "cut": True, "section": BOTH, "precision": "bf16"},
    {"stage": 3, "cut": True, **MUON},
    {"stage": 2, "cut": True, **LAMB},
    # What is repeated on all is not gathered, so not in 8 bits; nor is what stays whole where all is cut alike.
    {"stage": 3, "section": {"zero_quantized_weights": True, "stage3_param_persistence_threshold": 2000}},
]


@pytest.mark.parametrize("json", [*SHORT, *longer(*LONG)], ids=str)
def test_bits_do_not_depend_on_the_meshes_of_units(pool, json):
    for one, other in both(pool, json):
        assert differences(other, one, "losses", "weights", "exact", "moments") == []
        assert other.norms == pytest.approx(one.norms, rel=1e-12)


def spoilt(engine: Any, number: int, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One backward, which overflows on rank 2 in the second micro-step."""
    loss = engine(*inputs)
    engine.backward(loss * (float("inf") if (number, engine.global_rank) == (1, 2) else 1.0))
    return loss


@pytest.mark.parametrize("stage", [2, *longer(1, 3)])
def test_an_overflow_on_one_rank_skips_the_step_of_all(pool, stage):
    for one, other in both(pool, {"stage": stage, "cut": True, "precision": "fp16"}, steps=4, loop=spoilt):
        assert differences(other, one, "weights", "exact", "moments") == []
        assert one.skipped == other.skipped >= 1


@pytest.mark.parametrize(("save", "load", "stage"), [(mixed, alike, 3), *longer((alike, mixed, 3), (mixed, alike, 1))])
def test_a_checkpoint_of_one_goes_on_in_the_other(pool, tmp_path, save, load, stage):
    def json(model: Any) -> dict[str, Any]:
        return {"stage": stage, "cut": True, "zero": {**TREE, **({"shard_size": 2} if model is mixed else {})}}

    wanted = scenario(pool, save, json(save), 4, 2, save=str(tmp_path), state=True)
    wanted = scenario(pool, save, json(save), 4, 2, first=2, load=str(tmp_path), state=True)
    found = scenario(pool, load, json(load), 4, 2, first=2, load=str(tmp_path), state=True)
    for one, other in zip(wanted, found, strict=True):
        assert differences(other, one, "losses", "weights", "exact", "moments") == []


def alike_first() -> torch.nn.Module:
    """What is read first is shared by ranks that are no neighbours, all else is cut over all."""
    net = alike()
    share_along(ALL, net.parameters())
    share_along(ACROSS, net.embed.parameters())
    return net


@pytest.mark.parametrize("stage", [3, *longer(1)])
def test_only_ranks_that_hold_the_same_part_are_compared(pool, stage):
    zero = {"shard_size": 2, "check_replicas": 1}
    (first, *_) = scenario(pool, alike_first, {"stage": stage, "cut": True, "zero": zero}, 4)
    assert first.steps == 3


def norm_and_owners() -> tuple[float, float, dict[str, set[int]]]:
    """The norm in the default order, that of whole gradients in fp64, and which ranks share each unit with this one."""
    engine, *_ = zero.initialize(model=mixed(), config=settings(2, 4, zero={"shard_size": 2}))
    engine.backward(engine(*share(0)))
    squares = [safe_get_full_grad(param).double().square().sum().item() for param in engine.module.parameters()]
    engine.step()
    units = engine.describe().units
    owners = {unit.name: {rank for each in unit.parameters for rank in each.owners} for unit in units}
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return norm, math.sqrt(sum(squares)), owners


def test_the_norm_counts_each_element_once_whoever_shares_it(pool):
    for rank, (norm, whole, owners) in enumerate(pool.run(4, norm_and_owners)):
        assert norm == pytest.approx(whole, rel=1e-12)
        neighbour, other = rank ^ 1, rank ^ 2
        assert owners["blocks.0"] == {0, 1, 2, 3}
        assert owners["blocks.1"] == {rank, neighbour}
        assert owners["blocks.2"] == {rank, other}
        assert owners["embed" if "embed" in owners else "<root>"] == {rank}


# --- messages and groups ---------------------------------------------------------------------------------------------


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


@pytest.mark.ranks(3)
def test_an_exchange_brings_what_was_sent():
    """Each rank sends rank r so many more elements, none to rank 0."""
    world, rank = make_world(60.0), dist.get_rank()
    sends, receives = [0, 2, 4], [2 * rank] * 3
    sent = torch.cat([torch.full((count,), 10.0 * rank + to) for to, count in enumerate(sends)])
    wanted = torch.cat([torch.full((2 * rank,), 10.0 * source + rank) for source in range(3)])
    assert torch.equal(comm.exchange(sent, sends, receives, world, "exchange"), wanted)
    world.watchdog.close()


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
