"""The promise: with parameters off the device it holds gathered units and nothing else of them, as was computed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from marks import each_once
from scenario import settings
from test_init_memory import Census
from test_plan_memory import unit
from torch import nn

import zero
from zero.plan.memory import StateBytes, alive_nbytes
from zero.plan.placement import Placement, Where, place
from zero.plan.sharding import Sharding

CPU = {"device": "cpu"}
WIDTH, LAYERS = 96, 12
UNIT_NBYTES = 4 * WIDTH * WIDTH


def test_the_formula_by_hand() -> None:
    """A unit of 128 elements on 4 ranks, shards of 32: what is where, in bf16 with fp32 masters, and in fp32."""
    device, host, file = Where.DEVICE, Where.HOST, Where.FILE
    cut, alone = Sharding.of_stage(3), (unit("u", 128, 4),)

    def alive(dtype: str, optimizer: Where, params: Where, **more: Any) -> StateBytes:
        return alive_nbytes((unit("u", 128, 4, dtype),), cut, 4, placements=[Placement(optimizer, params)], **more)

    assert alive("bf16", device, device) == alive_nbytes(alone, cut, 4) == StateBytes(2 * 32, 0, 12 * 32)
    for away in (host, file):
        assert alive("bf16", away, away) == alive("fp32", away, away) == StateBytes(0, 0, 0)
        assert alive("bf16", away, away, gathered=["u"]) == StateBytes(2 * 128, 0, 0)
        assert alive("bf16", device, away) == StateBytes(0, 0, (2 + 12) * 32)  # a copy of the shard by its master
        assert alive("fp32", device, away) == StateBytes(0, 0, (4 + 8) * 32)  # which is the master
        assert alive("bf16", away, device, reduced_gradients=["u"]) == StateBytes(2 * 32, 0, 0)
    assert alive("fp32", device, host, mirrored=False) == StateBytes(0, 0, 8 * 32)
    assert alive("bf16", device, device, reduced_gradients=["u"]).gradients == 4 * 32
    (split,) = place(alone, 4, host, file, ratio=0.0)
    assert split == Placement(device, file)


class Layer(nn.Linear):
    """A unit of one square weight."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)


class Device(Census):
    """Counts storages that are not in the engine's host memory: on this machine, what a device would hold."""

    arena: tuple[int, int] = (0, 0)

    def count(self) -> int:
        first, last = self.arena
        tensors = [found for reference in self._old if (found := reference()) is not None] + self._tensors()
        with torch._C.DisableTorchFunctionSubclass():
            held = {found.untyped_storage()._cdata: found.untyped_storage() for found in tensors}
            return sum(each.nbytes() for each in held.values() if not first <= each.data_ptr() < last)


def built(cut: dict[str, Any] | None) -> nn.Sequential:
    torch.manual_seed(4)
    if cut is None:
        return nn.Sequential(*(Layer() for _ in range(LAYERS)))
    with zero.Init(remote_device=cut["device"]):
        return nn.Sequential(*(Layer() for _ in range(LAYERS)))


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "init"), each_once([1, 2], [False, True]))
def test_only_gathered_units_are_on_the_device(tmp_path: Any, world: int, init: bool) -> None:
    """Storages at rest, and what the engine says of each moment of a step."""
    file = {"device": "nvme", "nvme_path": str(tmp_path)}
    filed = {"offload_param": {**file, "max_in_cpu": 0}, "offload_optimizer": file}
    for section in {"offload_param": CPU, "offload_optimizer": CPU}, filed:
        census = Device()
        start = census.count()
        model = built(section["offload_param"] if init else None)
        json = {"stage": 3, "section": {"stage3_prefetch_bucket_size": 1, **section}, "zero": {"units": ["Layer"]}}
        engine = zero.initialize(model=model, config=settings(json, world))[0]
        arena = engine._sharded.offload._arena
        census.arena = (arena.address, arena.address + arena.nbytes)
        gc.collect()
        assert census.count() - start < UNIT_NBYTES / 8, "something of the model stayed on the device"
        assert engine.state_nbytes() == StateBytes(0, 0, 0)
        during: list[int] = []

        def look(*_: Any, engine: Any = engine, during: list[int] = during) -> None:
            during.append(engine.state_nbytes().parameters)

        for layer in model:
            layer.register_forward_hook(look)
            layer.register_full_backward_hook(look)
        for index in range(3):
            engine.backward(engine(torch.ones(2, WIDTH) * index).square().mean())
            engine.step()
        gc.unfreeze()
        engine.destroy()
        assert len(during) == 3 * 2 * LAYERS
        # In use, the next, and one that is about to go.
        assert UNIT_NBYTES <= max(during) <= 3 * UNIT_NBYTES
