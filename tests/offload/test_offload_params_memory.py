"""The promise: with parameters off the device it holds gathered units and nothing else of them, as was computed before.

Also while an engine is made, from a plain model and from one that was built under `zero.Init`.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import each_once
from models import batch, config, make_net
from test_init_memory import Census
from torch import nn

import zero
from zero.core.unit import Unit
from zero.plan.formats import Formats
from zero.plan.memory import StateBytes, alive_nbytes
from zero.plan.placement import Placement, Where, place
from zero.plan.sharding import Sharding

CPU = {"device": "cpu"}
BLOCKS = 2


def sections(folder: str) -> list[dict[str, Any]]:
    """Parameters off the device, alone and with the optimizer's state, in memory and in files."""
    file = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    return [
        {"offload_param": CPU},
        {"offload_param": file},
        {"offload_param": CPU, "offload_optimizer": CPU},
        {"offload_param": file, "offload_optimizer": {"device": "nvme", "nvme_path": folder}},
        {"offload_param": CPU, "stage3_param_persistence_threshold": 250},
    ]


def phases(section: dict[str, Any], bf16: bool) -> tuple[list[tuple[str, StateBytes, StateBytes]], int]:
    """At each phase of a step what the engine says is alive, and what was computed; bytes of the parameters whole."""
    world = dist.get_world_size()
    settings = config(
        3, world, bf16={"enabled": bf16}, zero_optimization={"stage": 3, "stage3_prefetch_bucket_size": 0, **section}
    )
    engine, *_ = zero.initialize(model=make_net(blocks=BLOCKS), config=settings)
    sharded, seen = engine._sharded, []
    plans, rank = [unit.plan for unit in sharded.units], dist.get_rank()

    def look(name: str, **alive: Any) -> None:
        planned = alive_nbytes(
            plans,
            Sharding.of_stage(3),
            world,
            rank=rank,
            formats=Formats("remainder") if bf16 else Formats(),
            placements=sharded.offload.placements,
            mirrored=sharded.offload._separate,
            limits=sharded.prefetcher._limits,
            **alive,
        )
        seen.append((name, engine.state_nbytes(), planned))

    look("rest")
    for index, block in enumerate(engine.module.blocks):
        gathered = {"<root>", f"blocks.{index}"}
        block.register_forward_pre_hook(lambda *_, i=index, g=gathered: look(f"forward {i}", gathered=g))
    loss = engine(*batch(0, 2))
    look("forward done")
    engine.backward(loss)
    everything = {plan.name for plan in plans}
    look("backward done", reduced_gradients=everything)
    engine.step()
    engine.optimizer.settle()
    # Where gradients are not cut, their memory stays for the next step.
    look("step done", reduced_gradients=everything if world == 1 else ())
    whole = sum(unit.full.numel() * unit.full.itemsize for unit in sharded.units)
    engine.destroy()
    return seen, whole


def phases_apart(*args: Any) -> Any:
    """As `phases`, on a device that is said to have memory of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.core.offload, "has_own_memory", lambda device: True)
        return phases(*args)


def persistent(section: dict[str, Any]) -> bool:
    return "stage3_param_persistence_threshold" in section


@pytest.mark.parametrize(("world", "way", "bf16"), [(1, phases, False), (2, phases, True), (2, phases_apart, False)])
def test_bytes_alive(pool, tmp_path, world, way, bf16):
    for section in sections(str(tmp_path)):
        for seen, whole in pool.run(world, way, section, bf16):
            for name, found, wanted in seen:
                assert found == wanted, (section, name)
            if not persistent(section):
                assert seen[0][1].parameters == seen[-1][1].parameters == 0
                assert 0 < max(found.parameters for _, found, _ in seen) < whole


def test_the_formula_by_hand():
    """A unit of 128 elements on 4 ranks, shards of 32: what is where, in bf16 with fp32 masters, and in fp32."""
    from test_plan_memory import unit

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


WIDTH, LAYERS = 96, 12
UNIT_NBYTES = 4 * WIDTH * WIDTH


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


def build() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def measured(section: dict[str, Any], built: bool) -> tuple[int, int, int]:
    """Bytes of model state on the device: the most while an engine is made, at rest, and the most in a step."""
    census = Device()
    start = census.count()
    if built:
        with zero.Init(remote_device=section["offload_param"]["device"]):
            model = build()
    else:
        model = build()
    given, seen = census.count() - start, []  # the model as it was built lies in host memory, whatever the device

    def noted(self: Unit, *args: Any, **kwargs: Any) -> None:
        if type(self) is Unit and self.index not in adopted:
            adopted.add(self.index)
            seen.append(sum(unit.full.untyped_storage().nbytes() for unit in all_units))
        release(self, *args, **kwargs)

    adopted: set[int] = set()
    all_units: list[Unit] = []
    adopt, release = Unit.adopt, Unit.release
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "adopt", lambda self, *args: (all_units.append(self), adopt(self, *args))[1])
        patch.setattr(Unit, "release", noted)
        sections = {"stage": 3, "stage3_prefetch_bucket_size": 1, **section}
        settings = config(3, dist.get_world_size(), zero_optimization=sections, zero={"units": ["Layer"]})
        engine, *_ = zero.initialize(model=model, config=settings)
    making = max(seen)
    arena = engine._sharded.offload._arena
    census.arena = (arena.address, arena.address + arena.nbytes)
    gc.collect()
    rest, during = census.count() - start, []
    assert given > 0
    for layer in engine.module:
        layer.register_forward_hook(lambda *_: during.append(engine.state_nbytes().parameters))
        layer.register_full_backward_hook(lambda *_: during.append(engine.state_nbytes().parameters))
    for index in range(3):
        engine.backward(engine(torch.ones(2, WIDTH) * index).square().mean())
        engine.step()
    gc.unfreeze()
    engine.destroy()
    assert len(during) == 3 * 2 * LAYERS
    return making, rest, max(during)


@pytest.mark.parametrize(("world", "built"), each_once([1, 2], [False, True]))
def test_only_gathered_units_are_on_the_device(pool, tmp_path, world, built):
    for section in sections(str(tmp_path))[2:4]:
        for making, rest, step in pool.run(world, measured, section, built):
            assert making <= UNIT_NBYTES
            assert rest < UNIT_NBYTES / 8, "something of the model stayed on the device"
            assert UNIT_NBYTES <= step <= 3 * UNIT_NBYTES  # in use, the next, and one that is about to go
