"""The promise: over NCCL, whose waits end on the device and not on the host, training is what it is over gloo.

The backend is tests/fake_nccl.py: no GPU is here. It holds against what is proven with it that it sees the mistakes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nccl import on_fake_nccl
from marks import longer
from models import config, make_net, share
from ranks import Pool, said_by
from stand_in_device import DEVICE

import zero
from zero.core import comm
from zero.core.world import MARGIN


def train(fake: bool, stage: int, more: dict[str, Any]) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps, and the parameters after them."""
    if not fake:
        return steps(stage, more, "cpu")
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        patch.setenv("LOCAL_WORLD_SIZE", str(dist.get_world_size()))  # one machine, where we add up what is in 16 bits
        return steps(stage, more, DEVICE)


def steps(stage: int, more: dict[str, Any], device: Any) -> tuple[list[float], list[torch.Tensor]]:
    model, accumulation = make_net(), more.get("accumulation", 1)
    engine, *_ = zero.initialize(model=model, config=config(stage, dist.get_world_size(), **more))
    losses = []
    for number in range(3 * accumulation):
        loss = engine(*(part.to(device) for part in share(number)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, [param.detach().cpu() for param in model.parameters()]


CASES = [
    (0, {}),
    (1, {"bf16": {"enabled": True}}),
    (2, {"accumulation": 2}),
    (3, {"gradient_clipping": 0.1}),
    *longer(
        (1, {"accumulation": 2, "zero": {"check_order": True}}),
        (2, {"zero": {"reduce": "tree"}}),
        (3, {"zero": {"check_order": True}, "bf16": {"enabled": True}}),
        (3, {"fp16": {"enabled": True, "initial_scale_power": 20}}),
    ),
]


@pytest.mark.parametrize(("stage", "more"), CASES)
def test_every_stage_trains_as_over_gloo(pool: Pool, stage: int, more: dict[str, Any]) -> None:
    """The order of a sum of two does not matter, so the bits are the same."""
    for (losses, params), (wanted, others) in zip(
        pool.run(2, train, True, stage, more), pool.run(2, train, False, stage, more), strict=True
    ):
        assert losses == wanted
        assert all(map(torch.equal, params, others))


def begun(stage: int, shard_size: int) -> list[dict[str, Any]]:
    """Of the axes along which a model was trained: their ranks, what each communicator has carried, its time-out."""
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        section = {"stage": stage} | ({"mics_shard_size": shard_size} if shard_size else {})
        world = dist.get_world_size()
        engine, *_ = zero.initialize(model=make_net(), config=config(stage, world, zero_optimization=section))
        mesh = engine._sharded.units[0].mesh
        for axis in (mesh.data, mesh.shard, mesh.replica):
            for group in filter(None, (axis.group, axis.second)):
                group.begun.clear()
        engine.backward(engine(*(part.to(DEVICE) for part in share(0))))
        engine.step()
        found = [
            {
                "ranks": axis.ranks,
                "first": {text.split()[0] for text in axis.group.begun},
                "second": {text.split()[0] for text in axis.second.begun},
                "options": axis.second.options,
                "time-outs": {group.timeout.total_seconds() for group in (axis.group, axis.second)},
            }
            for axis in (mesh.shard, mesh.replica)
            if axis.size > 1
        ]
        engine.destroy()
        return found


@pytest.mark.parametrize("stage", [0, 3])
def test_gathers_and_reductions_have_a_communicator_each(pool: Pool, stage: int) -> None:
    limits = {600.0 + MARGIN}
    for (axis,) in pool.run(2, begun, stage, 0):
        assert axis.pop("options") == "those of NCCL"
        assert axis == {"ranks": (0, 1), "first": {"all_gather"}, "second": {"reduce_scatter"}, "time-outs": limits}


@pytest.mark.long
def test_so_they_have_along_both_axes_of_replicas_and_shards(pool: Pool) -> None:
    for rank, (shard, replica) in enumerate(pool.run(4, begun, 3, 2)):
        assert shard["ranks"] == ((0, 1) if rank < 2 else (2, 3))
        assert replica["ranks"] == (rank % 2, rank % 2 + 2)
        for axis in (shard, replica):
            assert (axis["first"], axis["second"]) == ({"all_gather"}, {"reduce_scatter"})
            assert axis["time-outs"] == {600.0 + MARGIN}


def mistakes() -> dict[str, Any]:
    """What the fake makes of mistakes that NCCL would not forgive."""
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch) as device:
        rank, world = dist.get_rank(), dist.group.WORLD
        values, full = torch.ones(2, device=DEVICE), torch.zeros(4, device=DEVICE)
        found: dict[str, Any] = {"host": said_by(lambda: comm._all_gather(torch.zeros(4), torch.ones(2)))}
        found["mixed"] = said_by(lambda: values + torch.ones(2))
        work = comm._all_gather(full, values, async_op=True)
        with pytest.raises(AssertionError) as early:
            full.sum()
        found["early"] = str(early.value)
        again = torch.zeros(4, device=DEVICE)
        comm._all_gather(again, values, async_op=True).wait()
        found["later"] = again.tolist()

        apart = dist.new_group([0, 1])
        first, second = torch.ones(1, device=DEVICE), torch.ones(2, device=DEVICE)
        parted = [dist.all_reduce(each, group=apart, async_op=True) for each in ((first, second)[:: 1 - 2 * rank])]
        beside = torch.ones(3, device=DEVICE)
        dist.all_reduce(beside, group=world, async_op=True).wait()
        found["beside"] = beside.tolist()  # the other communicator goes on
        found["parted"] = [work.is_completed() for work in parted]
        found["was there"] = work.is_completed()
        apart.abort()
        found["aborted"] = [work.is_completed() for work in parted]
        device.on_way.clear()
        return found


def test_the_fake_sees_the_mistakes_that_nccl_punishes(pool: Pool) -> None:
    for found in pool.run(2, mistakes):
        assert found["host"] == "RuntimeError: No backend type associated with device type cpu"
        assert "expected all tensors to be on the same device" in found["mixed"]
        assert found["early"].endswith("on a buffer of the all_gather of 2 torch.float32, for which no stream waits")
        assert found["later"] == [1.0] * 4
        assert found["beside"] == [2.0] * 3
        assert found["parted"] == [False, False]
        assert found["was there"]
        assert found["aborted"] == [True, True]
