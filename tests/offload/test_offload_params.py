"""The promise: parameters that rest elsewhere change no number, whatever the knobs, the model and the loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import config, make_net, train
from stages import build, inputs
from test_hostile_models import Checkpointed, by_engine, with_evaluation
from test_matrix import run as run_case

import zero
from zero.plan.placement import Where

CPU = {"device": "cpu"}
STEPS = 3


def files(folder: Path | str, **more: Any) -> dict[str, Any]:
    """The section `offload_param` with all shards in files."""
    return {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0, **more}


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two runs have the same bits."""
    params = found["params"], wanted["params"]
    rest = [{key: value for key, value in run.items() if key != "params"} for run in (found, wanted)]
    return rest[0] == rest[1] and all(torch.equal(value, params[1][name]) for name, value in params[0].items())


def run_all(sections: list[dict[str, Any]], accumulation: int, more: dict[str, Any]) -> list[bool]:
    """Train once at stage 3 without offload, and with each of the sections; which are the same."""

    def run(section: dict[str, Any]) -> dict[str, Any]:
        settings = {**more, "zero_optimization": {"stage": 3, **section}}
        world = dist.get_world_size()
        return train(make_net(), world, config(3, world, accumulation=accumulation, **settings), steps=STEPS)

    plain = run({})
    assert len(set(plain["losses"])) == STEPS * accumulation, "it does not learn"
    return [same(run(section), plain) for section in sections]


STATE = {"offload_optimizer": CPU}
BF16 = {"bf16": {"enabled": True}}
CLIPPED = {"gradient_clipping": 0.5}


KNOBS = [
    {"stage3_prefetch_bucket_size": 0},
    {"stage3_prefetch_bucket_size": 1},
    {"stage3_max_live_parameters": 1},
    {"stage3_max_reuse_distance": 10**6},
    {"stage3_param_persistence_threshold": 400},
]


def test_bits_under_every_knob(pool, tmp_path):
    sections = [{**STATE, "offload_param": files(tmp_path, buffer_count=2), **knob} for knob in KNOBS]
    sections += [{**STATE, "offload_param": CPU, **KNOBS[-1]}]
    sections += [{**STATE, "offload_param": files(tmp_path, buffer_count=1)}]
    for found in pool.run(2, run_all, sections, 2, CLIPPED):
        assert found == [True] * len(sections)


def test_bits_with_one_order_of_collectives(pool, tmp_path):
    """Ranks that must begin them alike do, although each waits for its own drive and its own updates."""
    sections = [{"offload_param": param, **STATE} for param in (CPU, files(tmp_path, buffer_count=2))]
    for found in pool.run(3, run_all, sections, 1, {"zero": {"check_order": True}}):
        assert found == [True, True]


def run_cases(name: str, sections: list[dict[str, Any]]) -> list[bool]:
    plain = run_case(name, 3, "fp32")
    return [same(run_case(name, 3, "fp32", zero_optimization={"stage": 3, **one}), plain) for one in sections]


@pytest.mark.parametrize("name", ["Adapter", "Tied", "RankExperts", "SometimesEncoder", "Twice"])
def test_bits_of_awkward_models(pool, tmp_path, name):
    sections = [{"offload_param": files(tmp_path, buffer_count=2), **STATE}, {"offload_param": CPU}]
    for found in pool.run(2, run_cases, name, sections):
        assert found == [True, True]


def run_loops(sections: list[dict[str, Any]]) -> list[list[bool]]:
    """Recomputation in backward, and evaluation between steps, by the way the training loop is written."""

    def run(section: dict[str, Any], loop: Any) -> dict[str, Any]:
        world, model = dist.get_world_size(), build(Checkpointed)
        settings = config(3, world, zero_optimization={"stage": 3, **section})
        engine, *_ = zero.initialize(model=model, config=settings)
        for step in range(STEPS):
            loop(engine, inputs(step, dist.get_rank()), dist.get_rank(), 1.0)
        engine.destroy()
        return {"params": {name: param.detach() for name, param in model.named_parameters()}}

    return [[same(run(one, loop), run({}, loop)) for one in sections] for loop in (by_engine, with_evaluation)]


@pytest.mark.parametrize("world", [2, *longer(1)])
def test_bits_with_recomputation_and_evaluation(pool, tmp_path, world):
    sections = [{"offload_param": files(tmp_path, buffer_count=2), **STATE}, {"offload_param": CPU}]
    for found in pool.run(world, run_loops, sections):
        assert found == [[True, True], [True, True]]


def inside(folder: str) -> list[tuple[int, int]]:
    """Rooms in elements of this rank's shards, around what the first units take, and how many are in host memory."""
    found, rooms = [], [10**9, 0]
    while rooms:
        room = rooms.pop(0)
        section = {"offload_param": files(folder, max_in_cpu=room)}
        assert run_all([section], 1, {}) == [True]
        engine, *_ = zero.initialize(model=make_net(), config=config(3, 2, zero_optimization={"stage": 3, **section}))
        places = engine._sharded.offload.placements
        sizes = [unit.window.numel for unit in engine._sharded.units]
        engine.destroy()
        held = [size for size, place in zip(sizes, places, strict=True) if place.params is Where.HOST]
        found.append((room, sum(held)))
        if room == 10**9:
            assert held == sizes, "the default leaves a small model in memory"
            rooms += [min(sizes), min(sizes) - 1]
    return found


def test_as_many_elements_stay_in_memory_as_may(pool, tmp_path):
    for (_, whole), *others in pool.run(2, inside, str(tmp_path)):
        (_, nothing), (smallest, one), (_, too_few) = others
        assert (nothing, one, too_few) == (0, smallest, 0)
        assert smallest < whole
