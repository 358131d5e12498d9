"""The promise: parameters off the device change no number, whatever the knobs, the model and what a script does.

Each run is compared, bit by bit, with the same one without offload. What is read from a file is read ahead. The device
holds gathered units and nothing else of them.
"""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import each_once, longer
from matrix_models import UNITS, build, inputs, loss_of
from models import batch, config, make_net, step
from scenario import Model, differences, run, settings
from stages import build as build_kind
from test_hostile_models import Checkpointed
from test_init_memory import Census
from torch import nn

import zero
from zero.plan.memory import StateBytes

pytestmark = pytest.mark.ranks(2)
CPU = {"device": "cpu"}
STATE = {"offload_optimizer": CPU}
BOTH = {**STATE, "offload_param": CPU}
BLOCKS = 6


def files(folder: Path | str, **more: Any) -> dict[str, Any]:
    """All shards in files."""
    return {"offload_param": {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0, "buffer_count": 2, **more}}


def unlike(model: Any, sections: list[dict[str, Any]], json: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """The sections of `zero_optimization` under which a training at stage 3 leaves another record than without them."""
    wrong, plain = [], run(model, {"stage": 3, **json}, state=True, **more)
    assert len(set(plain.losses)) > 1, "it does not learn"
    for section in sections:
        found = run(model, {"stage": 3, **json, "section": {**json.get("section", {}), **section}}, state=True, **more)
        if differences(found, plain, "losses", "norms", "weights", "exact", "moments", "seen"):
            wrong.append(section)
    return wrong


KNOBS = [
    {"stage3_prefetch_bucket_size": 0},
    {"stage3_max_live_parameters": 1},
    {"stage3_max_reuse_distance": 10**6},
    {"stage3_param_persistence_threshold": 400},
]


def test_bits_under_every_knob(tmp_path: Path) -> None:
    sections = [{**STATE, **files(tmp_path, buffer_count=1), **knob} for knob in KNOBS]
    sections += [{**BOTH, **KNOBS[-1]}]
    assert unlike("net", sections, {"accumulation": 2, "gradient_clipping": 0.5}) == []


@pytest.mark.ranks(3)
def test_bits_with_one_order_of_collectives(tmp_path: Path) -> None:
    """Ranks that must begin them alike do, although each waits for its own drive and its own updates."""
    assert unlike("net", [BOTH, {**STATE, **files(tmp_path)}], {"zero": {"check_order": True}}) == []


def by_loss(engine: Any, number: int, args: tuple[Any, ...]) -> torch.Tensor:
    engine.backward(loss := loss_of(engine(*args)))
    return loss


def evaluated(engine: Any, number: int, args: tuple[Any, ...]) -> torch.Tensor:
    """With a forward in eval mode before it."""
    engine.eval()
    with torch.no_grad():
        engine(*args)
    engine.train()
    return by_loss(engine, number, args)


@pytest.mark.parametrize("name", ["RankExperts", "SometimesEncoder", *longer("Adapter", "Tied", "Twice")])
def test_bits_of_awkward_models(tmp_path: Path, name: str) -> None:
    model = Model(functools.partial(build, name), lambda number, part: (inputs(number, part), part, number))
    json = {"zero": {"units": UNITS.get(name, [])}}
    assert unlike(model, [{**STATE, **files(tmp_path)}, {"offload_param": CPU}], json, loop=by_loss) == []


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, *longer(1)])
def test_bits_with_recomputation_and_evaluation(tmp_path: Path, world: int) -> None:
    model = Model(lambda: build_kind(Checkpointed), lambda number, part: (inputs(number, part), part))
    for loop in by_loss, evaluated:
        assert unlike(model, [{**STATE, **files(tmp_path)}, {"offload_param": CPU}], {}, loop=loop) == []


def in_another_order(engine: Any, number: int, args: tuple[Any, ...]) -> torch.Tensor:
    """What was read ahead is not what comes."""
    blocks = list(engine.module.blocks)
    order = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3], [0, 1, 2, 3, 4, 5]][number]
    engine.module.blocks = nn.ModuleList(blocks[place] for place in order)
    engine.backward(loss := engine(*args))
    engine.module.blocks = nn.ModuleList(blocks)
    return loss


def test_another_order_than_foretold_waits_for_nobody(tmp_path: Path) -> None:
    model = Model(lambda: make_net(blocks=BLOCKS))
    sections = [{**STATE, **files(tmp_path, buffer_count=slots)} for slots in (1, 5)]
    assert unlike(model, sections, {}, steps=4, loop=in_another_order) == []


def built(way: dict[str, Any] | None) -> nn.Module:
    if way is None:
        return make_net()
    with zero.Init(**way):
        return make_net()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "remote", "precision"), [(2, "nvme", "bf16"), *longer((1, "cpu", "bf16"), (2, None, "fp32"))]
)
def test_models_that_were_built_cut(tmp_path: Path, world: int, remote: str | None, precision: str) -> None:
    for section in {"offload_param": CPU}, {**files(tmp_path), **STATE}:
        ways = [None, {"remote_device": remote}, {"config": {"zero_optimization": {"stage": 3, **section}}}]
        json = {"stage": 3, "precision": precision, "section": section}
        plain, *others = (run(Model(functools.partial(built, way)), json, state=True) for way in ways)
        for found in others:
            assert not differences(found, plain, "losses", "norms", "weights", "exact", "moments")


def test_as_many_elements_stay_in_memory_as_may(tmp_path: Path) -> None:
    """Bytes of parameters in memory and in files, by how many elements may stay in memory."""
    found = {}
    for room in (10**9, 700, 0):
        json = {"stage": 3, "section": files(tmp_path, max_in_cpu=room)}
        held = run("net", json, 1, keep=lambda engine: engine.host_nbytes()).seen[-1]
        found[room] = (held.parameters, held.files)
    assert found[10**9][1] == 0, "the default leaves a small model in memory"
    assert 0 < found[700][0] <= 4 * 700 + 4096 * (BLOCKS + 1) and found[700][1] > 0
    assert found[0][0] == 0 and found[0][1] > found[700][1]


# Reads.


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "state"), [(2, STATE), *longer((1, {}))])
def test_the_next_read_starts_before_the_compute_ends(tmp_path: Path, world: int, state: dict[str, Any]) -> None:
    """In the third forward; in the first nobody knows what comes."""
    section = {"stage": 3, "stage3_prefetch_bucket_size": 1, **state, **files(tmp_path, buffer_count=3)}
    model = make_net(blocks=BLOCKS)
    engine = zero.initialize(model=model, config=config(3, world, zero_optimization=section))[0]
    events: list[str] = []
    engine._sharded.offload.swap_files["param"].pool.on_request = lambda what, unit: events.append(f"{what} {unit}")
    for index, block in enumerate(engine.module.blocks):
        block.register_forward_hook(lambda *_, name=f"blocks.{index}": events.append(f"end {name}"))
    for number in range(2):
        step(engine, number)
    engine.optimizer.settle()
    events.clear()
    engine(*batch(2, 2))
    reads = [index for index in range(1, BLOCKS) if f"read blocks.{index}" in events]
    assert len(reads) >= BLOCKS - 3  # some may have stayed in a slot
    assert all(events.index(f"read blocks.{at}") < events.index(f"end blocks.{at - 1}") for at in reads)
    engine.destroy()


# --- what is on the device -------------------------------------------------------------------------------------------


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


def built_of_layers(cut: dict[str, Any] | None) -> nn.Sequential:
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
        model = built_of_layers(section["offload_param"] if init else None)
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
