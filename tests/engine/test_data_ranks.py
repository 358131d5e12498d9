"""The ranks that data parallelism spans: torch's DeviceMesh, sizes, Megatron's mpu, and what contradicts the JSON."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, config, make_net
from ranks import said_by
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import TensorDataset

import zero
from zero.parallel.grid_groups import GridGroups
from zero.plan.grid import Grid

pytestmark = pytest.mark.ranks(4)
NAMES = ("dp_replicate", "dp_shard")


def owners(json: dict[str, Any], **arguments: Any) -> set[int]:
    """The global ranks among which state is cut, of those that this rank knows of."""
    engine, *_ = zero.initialize(model=make_net(), config=json, **arguments)
    found = {rank for unit in engine.describe().units for one in unit.parameters for rank in one.owners}
    assert engine.dp_world_size == 4
    engine.destroy()
    return found


def test_all_ways_to_say_two_replicas_of_two_shards():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    mics = config(3, 4)
    mics["zero_optimization"]["mics_shard_size"] = 2
    ways = [
        *({"mesh_param": (2, 2)}, {"device_mesh": dict(zip(NAMES, (2, 2), strict=True))}, {"device_mesh": mesh}),
        {"mesh_param": init_device_mesh("cpu", (2, 2))},
    ]
    found = [owners(config(3, 4), **way) for way in ways]
    found += [owners(config(3, 4, zero={"shard_size": 2})), owners(mics), owners(mics, mesh_param=(2, 2))]
    base = dist.get_rank() // 2 * 2
    assert found == [{base, base + 1}] * 7
    assert owners(config(3, 4), device_mesh=init_device_mesh("cpu", (4,))) == {0, 1, 2, 3}


def test_contradictions_are_refused_with_the_numbers():
    """What is said of each of these, on all ranks alike and before anything is sent."""
    hpz = config(3, 4)
    hpz["zero_optimization"]["zero_hpz_partition_size"] = 2
    cases = [
        (config(3, 4), {"mesh_param": (3, 2)}),
        (config(0, 4), {"mesh_param": (2, 2)}),
        (config(3, 4, zero={"shard_size": 4}), {"mesh_param": (2, 2)}),
        (config(3, 4, zero={"shard_size": 1}), {"device_mesh": init_device_mesh("cpu", (2, 2))}),
        (hpz, {"mesh_param": (2, 2)}),
        (config(3, 4), {"mesh_param": (2, 2), "device_mesh": init_device_mesh("cpu", (2, 2))}),
        (config(3, 4), {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))}),
        (config(3, 4), {"device_mesh": init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", *NAMES))}),
        (config(3, 4), {"device_mesh": DeviceMesh("cpu", [[0, 2], [1, 3]])}),
        (config(3, 2), {"mesh_param": {"dp_shard": 2, "tp": 2}}),
        (config(3, 2, gradient_clipping=1.0), {"mpu": GridGroups(Grid(4, {"tp": 2}))}),
        (config(1, 1, tensor_parallel={"autotp_size": 4}), {"mpu": GridGroups(Grid(4, {"tp": 2}))}),
        (config(1, 2, tensor_parallel={"autotp_size": 2}), {"mpu": GridGroups(Grid(4, {"cp": 2}))}),
    ]
    wanted = [
        "ConfigError: mesh_param: dp_replicate 3 x dp_shard 2 = 6 ranks, but there are 4",
        "ConfigError: mesh_param=(2, 2): got 2 ranks to cut state over with zero_optimization.stage 0",
        "ConfigError: zero.shard_size: got 4, and mesh_param=(2, 2) cuts state over 2 ranks; keep one of the two",
        "ConfigError: zero.shard_size: got 1, and device_mesh of shape (2, 2) cuts state over 2 ranks",
        "ConfigError: zero_optimization.zero_hpz_partition_size: got 2, and mesh_param=(2, 2) cuts state over 2 of 4",
        "ValueError: initialize() got mesh_param and device_mesh, which say the same; pass one of them",
        "ValueError: device_mesh: got a mesh of dimensions 'dp', 'tp'; wanted the data-parallel ones",
        "ValueError: device_mesh: got a mesh of dimensions 'pp', 'dp_replicate', 'dp_shard'; wanted",
        "ValueError: device_mesh: got ranks in the order [0, 2, 1, 3]; wanted them ascending, shards innermost",
        "ValueError: tensor_parallel.autotp_size 2: nothing tells how Net is cut; its layers are",
        "ConfigError: mpu: got 2 ranks for one replica of the model; the gradient norm and the check for overflow",
        "ValueError: mpu: 2 ranks share layers, and tensor_parallel says 4; wanted one number",
        "ValueError: mpu: got ranks that share layers and ranks that share sequences; wanted one of the two",
    ]
    for (json, arguments), said in zip(cases, wanted, strict=True):
        assert said_by(lambda: zero.initialize(model=make_net(), config=json, **arguments)).startswith(said)  # noqa: B023


def test_ranks_that_cut_over_different_numbers_are_told():
    rank = dist.get_rank()
    json = config(3, 4, zero={"shard_size": 4 if rank else 2})
    wanted = f"shard_size is {0 if rank else 2} on rank {rank}, and from 0 to 2 on all"
    with pytest.raises(RuntimeError) as error:
        zero.initialize(model=make_net(), config=json)
    assert str(error.value) == f"the ranks do not initialize the same engine: {wanted}"


def beside_each_other() -> dict[str, Any]:
    """Ranks 0, 2 and ranks 1, 3 train a model each, with Megatron's groups for tp 2; batches by data-parallel rank."""
    groups = GridGroups(Grid(4, {"tp": 2}))
    settings = config(3, 2)
    data = TensorDataset(torch.arange(8))
    with zero.Init(mpu=groups):
        model = make_net()
    engine, _, loader, _ = zero.initialize(model=model, config=settings, mpu=groups, training_data=data)
    seen = sorted(int(index) for (part,) in loader for index in part)
    tp, place = dist.get_rank() % 2, groups.get_data_parallel_rank()
    for step in range(3):
        tokens, targets = batch(step + 100 * tp, 4)
        part = slice(place * 2, place * 2 + 2)
        engine.backward(engine(tokens[part], targets[part]))
        engine.step()
    sizes = (engine.train_batch_size(), engine.dp_world_size, engine.global_rank, engine.get_data_parallel_rank())
    state = engine._consolidated_16bit_state_dict() is not None
    with pytest.raises(ValueError, match="on all 4 ranks, and this engine is one of 2 of them"):
        engine.check([batch(0, 2)])
    with zero.GatheredParameters(engine.module.head.weight, modifier_rank=2 + tp):
        engine.module.head.weight.data.fill_(dist.get_rank())
    with pytest.raises(ValueError, match=rf"got {3 - tp}; wanted one of the engine's ranks \[{tp}, {2 + tp}\]"):
        zero.GatheredParameters(engine.module.head.weight, modifier_rank=3 - tp)
    written = engine.module.head.weight
    engine.destroy()
    written = written.unique().tolist()
    params = [param.detach().clone() for param in engine.module.parameters()]
    return {"params": params, "seen": seen, "sizes": sizes, "state": state, "written": written}


def test_engines_of_megatrons_groups_train_beside_each_other(pool):
    ranks = pool.run(4, beside_each_other)
    for first, second in ((0, 2), (1, 3)):
        assert all(map(torch.equal, ranks[first]["params"], ranks[second]["params"]))
        assert sorted(ranks[first]["seen"] + ranks[second]["seen"]) == list(range(8)), "each sample once in a group"
        assert [ranks[first]["state"], ranks[second]["state"]] == [True, False]
    assert not all(map(torch.equal, ranks[0]["params"], ranks[1]["params"]))
    for rank, found in enumerate(ranks):
        assert found["sizes"] == (4, 2, rank, rank // 2)
        assert found["written"] == [2 + rank % 2], "modifier_rank is a global rank"
