"""The promise: NCCL makes few communicators, none for a pair of ranks, and a step that repeats makes no event.

Counted on tests/fake_nccl.py and the stand-in for a GPU; what they cost there is not measured.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nccl import FakeNccl, on_fake_nccl
from marks import longer
from models import make_net, share, step
from scenario import settings

import zero
from zero.core import comm, p2p
from zero.core.world import make_world
from zero.plan.memory import communicators
from zero.watchdog.device_waits import DeviceWaits

HPZ = {"section": {"zero_hpz_partition_size": 2}}
HSDP = {"zero": {"shard_size": 2}}
# Ranks, JSON, ranks along shard, replica and with a second copy, and how many communicators that makes.
MADE = [
    (2, {"stage": 0}, (1, 2), 2),
    (2, {"stage": 3}, (2, 1), 2),
    *longer(
        (2, {"stage": 1}, (2, 1), 2),
        (2, {"stage": 2}, (2, 1), 2),
        (4, {"stage": 3, **HPZ}, (4, 1, 2), 4),
        (4, {"stage": 3, **HSDP}, (2, 2), 5),
    ),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "json", "sizes", "count"), MADE)
def test_an_engine_makes_as_few_communicators_as_planned(world: int, json: dict[str, Any], sizes: Any, count: int):
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        engine, *_ = zero.initialize(model=make_net(), config=settings(json, world))
        step(engine, 0)
        assert len(FakeNccl.made) == communicators(world, *sizes) == count
        engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_steps_that_repeat_make_no_event_and_read_one_number(stage: int):
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch, hosts=True) as device:
        engine, *_ = zero.initialize(model=make_net(), config=settings({"stage": stage}, 2))
        waits, made = engine._sharded.world.watchdog._device, []
        patch.setattr(waits, "look", lambda: None)  # of the watchdog's thread: at any time, so that events come back
        for number in range(4):
            device.waited.clear()
            step(engine, number)
            if number:  # the first one learns
                assert {*device.waited} <= {"synchronize in optim/outcome.py, numbers"}
            while waits._ordered:  # until the device is done
                DeviceWaits.look(waits)
                time.sleep(0.001)
            made.append(device.events)
        assert made[0] and made[1] == made[2] == made[3]
        engine.destroy()


@pytest.mark.ranks(3)
def test_messages_from_rank_to_rank_go_in_batches():
    """Also where some ranks have nothing to send, and as the first of a group once it is connected."""
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        world, there = make_world(60.0), torch.device("cuda", 0)
        rank, group = dist.get_rank(), world.new_group(range(3), 60.0, "messages")
        axis = replace(world, group_ref=weakref.ref(group))
        comm.connect(axis)
        # Rank 0 sends to 1, and 1 to 2; the last one sends nothing.
        mine = torch.full((4,), float(rank), device=there)
        ends = [mine] * (rank < 2), min(2, rank + 1), [(4,)] * (rank > 0), max(0, rank - 1)
        came = p2p.send_on(*ends, axis, "messages", mine).wait()
        assert [each.tolist() for each in came] == [[rank - 1.0] * 4] * (rank > 0)
        dealt = comm.deal(torch.arange(5.0, device=there) * (rank == 0), 2, axis)
        assert dealt.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 0.0]][rank]
        if rank == 0:
            p2p.send_ints([7, 8], [1, 2], axis).wait()
        else:
            assert p2p.receive_ints(2, 0, axis, "integers") == [7, 8]
        texts = [text for made in FakeNccl.made for text in made.begun]
        assert "batch" in texts and not {"send", "recv"} & {*texts}
        world.watchdog.close()


@pytest.mark.ranks(4)
def test_groups_need_no_other_ranks_and_no_equal_numbers_of_groups():
    """The program has made one more on some ranks; engines on one half of the ranks are none of the other's."""
    rank = dist.get_rank()
    alone = dist.new_group([rank], use_local_synchronization=True) if rank % 2 else None
    engine, *_ = zero.initialize(model=make_net(), config=settings({"stage": 3, **HSDP}, 4))
    step(engine, 0)
    engine.backward(engine(*share(1)))
    engine.step()
    assert engine.global_steps == 2
    engine.destroy()
    if alone is not None:
        dist.destroy_process_group(alone)
