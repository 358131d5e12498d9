"""The promise: a wait of the device, which the host has gone on from, is named as one of the host is, and ended."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from fake_nccl import on_fake_nccl
from models import config, make_net, share
from ranks import Pool, said_by
from stand_in_device import DEVICE

import zero
from zero.watchdog.device_waits import DeviceWaits
from zero.watchdog.rank_status import Collective


class Recorded:
    """An event in a stream that the test moves on."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        raise AssertionError("a look must not block")


def test_the_device_waits_where_it_has_passed_the_event_before_and_not_the_one_after() -> None:
    events: list[Recorded] = []

    def record() -> Recorded:
        events.append(Recorded())
        return events[-1]

    waits = DeviceWaits(record)
    for number in (1, 2):
        waits.order([], Collective("gather", f"block {number}", number), on_host=False)
    assert waits.look() is None, "the device still computes what comes before"
    events[0].passed = True
    first = waits.look()
    assert first is not None
    assert str(first.collective) == "gather of unit 'block 1' (#1)"
    assert waits.look() is first
    events[1].passed = True
    assert waits.look() is None
    events[2].passed = True
    second = waits.look()
    assert second is not None
    assert str(second.collective) == "gather of unit 'block 2' (#2)"
    events[3].passed = True
    assert waits.look() is None


def test_who_holds_the_lock_is_alone_in_asking_the_device() -> None:
    """As the capture of a CUDA graph needs it."""
    held: list[bool] = []

    class Asked(Recorded):
        def query(self) -> bool:
            held.append(waits.looking.locked())
            return len(held) == 2

    waits = DeviceWaits(Asked)
    waits.order([], Collective("gather", "block", 1), on_host=False)
    assert waits.look() is not None
    assert held == [True, True] and not waits.looking.locked()


def parted() -> str:
    """What rank 0 says of a forward that rank 1 does not take part in; rank 1 waits outside of the engine for that."""
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch) as device:
        engine, *_ = zero.initialize(model=make_net(), config=config(3, 2, zero={"timeout": 1.5}))
        store = dist.distributed_c10d._get_default_store()
        batch = [part.to(DEVICE) for part in share(0)]
        engine.backward(engine(*batch))
        engine.step()
        said = ""
        if dist.get_rank() == 0:
            said = said_by(lambda: engine(*batch))
            store.set("said", "")
        else:
            store.wait(["said"])
        device.on_way.clear()
        return said


def test_a_gather_that_never_ends_is_named_although_no_thread_waits_in_it(pool: Pool) -> None:
    said = pool.run(2, parted)[0]
    assert "rank 0 has waited for the gather of unit '" in said
    assert "in forward, the time-out (zero.timeout); rank 1: outside the engine since its step 1" in said
