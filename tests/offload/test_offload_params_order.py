"""The promise: a shard in a file is read while the units before it compute, and as far ahead as there are slots.

What is read, in which order, depends on the order of uses alone; what nobody comes for is given back.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, config, make_net, step

import zero

BLOCKS = 6


def start(folder: str, slots: int, state: dict[str, Any] | None = None, **knobs: Any) -> tuple[Any, list[str]]:
    """An engine whose shards rest in files, and the list to which its reads and the beginnings and ends of forwards of
    its blocks are added."""
    section = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, "buffer_count": slots}
    sections = {"stage": 3, "offload_param": section, **knobs, **({"offload_optimizer": state} if state else {})}
    settings = config(3, dist.get_world_size(), zero_optimization=sections)
    engine, *_ = zero.initialize(model=make_net(blocks=BLOCKS), config=settings)
    events: list[str] = []
    engine._sharded.offload.swap_files["param"].pool.on_request = lambda what, unit: events.append(f"{what} {unit}")
    for index, block in enumerate(engine.module.blocks):
        block.register_forward_pre_hook(lambda *_, name=f"blocks.{index}": events.append(f"begin {name}"))
        block.register_forward_hook(lambda *_, name=f"blocks.{index}": events.append(f"end {name}"))
    return engine, events


def forwards(folder: str, slots: int, state: dict[str, Any] | None, knobs: dict[str, Any]) -> list[str]:
    """The events of the third forward; in the first nobody knows what comes."""
    engine, events = start(folder, slots, state, **knobs)
    for index in range(2):
        step(engine, index)
    engine.optimizer.settle()
    events.clear()
    loss = engine(*batch(2, 2))
    found = list(events)
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return found


ONE_AHEAD = {"stage3_prefetch_bucket_size": 1}


@pytest.mark.parametrize("state", [None, {"device": "cpu"}])
@pytest.mark.parametrize("world", [1, 2])
def test_the_next_read_starts_before_the_compute_ends(pool, tmp_path, world, state):
    for events in pool.run(world, forwards, str(tmp_path), 3, state, ONE_AHEAD):
        reads = [index for index, event in enumerate(events) if event.startswith("read blocks")]
        assert len(reads) >= BLOCKS - 2  # some may have stayed in a slot
        for index in range(1, BLOCKS):
            name = f"read blocks.{index}"
            if name in events:
                assert events.index(name) < events.index(f"end blocks.{index - 1}")


def unforeseen(folder: Path | str, slots: int) -> list[float]:
    """Losses where the order of uses changes from step to step, so that what was read ahead is not what comes."""
    engine, _ = start(str(folder), slots, {"device": "cpu"})
    blocks, losses = engine.module.blocks, []
    for index, order in enumerate(([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3], [0, 1, 2, 3, 4, 5])):
        engine.module.blocks = torch.nn.ModuleList(blocks[place] for place in order)
        loss = engine(*batch(index, 2))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.module.blocks = blocks
    engine.destroy()
    return losses


def test_another_order_than_foretold_waits_for_nobody(pool, tmp_path):
    found = [pool.run(2, unforeseen, str(tmp_path), slots) for slots in (1, 2, 5)]
    assert found[0] == found[1] == found[2]
    assert all(len(set(losses)) == 4 for losses in found[0])


def held_up(folder: str, param: dict[str, Any]) -> tuple[bool, list[float]]:
    """Whether the first block ran while the last one's update was held up until then; and losses."""
    world = dist.get_world_size()
    sections = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": param}
    engine, *_ = zero.initialize(model=make_net(blocks=3), config=config(3, world, zero_optimization=sections))
    ran, holding, waited, losses = threading.Event(), False, [], []

    def hold(what: str, unit: str) -> None:
        if what == "update" and unit == "blocks.2" and holding:
            waited.append(ran.wait(20))

    engine.optimizer._updater.on_update = hold
    engine.module.blocks[0].register_forward_hook(lambda *_: ran.set())
    for index in range(5):
        if index == 2:  # from here on it is known what comes
            engine.optimizer.settle()
            holding = True
        loss = engine(*batch(index, 2))
        engine.backward(loss)
        ran.clear()
        engine.step()
        losses.append(loss.item())
    ran.set()  # for the last update, behind which no forward comes
    engine.destroy()
    return all(waited) and len(waited) == 3, losses


@pytest.mark.parametrize("world", [1, 2])
def test_what_comes_is_not_gathered_before_its_update_is_over(pool, tmp_path, world):
    file = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    runs = [pool.run(world, held_up, str(tmp_path), param) for param in ({"device": "cpu"}, file)]
    for (free, losses), (as_free, others) in zip(*runs, strict=True):
        assert free, "a forward that could have begun waited for an update of units that come later"
        assert as_free
        assert losses == others
