"""HSDP and hpZ: however ranks share state and parameters, they train as stage 3 over all of them does.

Under the tree bit by bit; by default the sums of gradients are rounded in another order. What travels between groups
of ranks that share state, and between nodes, is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import batch, make_net, step
from oracle import Training, near
from scenario import Model, Record, differences, run, runs, scenario, settings
from torch import nn

import zero
from zero.core import comm

SHARDS = (4, 2, 1)  # ranks that state is cut over, of four
HPZ = 0  # in their place: over all, and parameters over nodes of two ranks
STEPS = 3
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def mesh(stage: int, shard: int, reduce: str = "tree", section: Any = None, zero: Any = None, **more: Any) -> Any:
    """A JSON for four ranks."""
    node = {"zero_hpz_partition_size": 2} if shard == HPZ else {}
    cut = {"shard_size": shard} if 0 < shard < 4 else {}
    own = {"stage": stage, "section": {**(section or {}), **node}, "zero": {"reduce": reduce, **(zero or {}), **cut}}
    return {**own, "gradient_clipping": 0.3, **more}


def on_all_meshes(pool: Any, reduce: str, precision: str, stages: tuple[int, ...]) -> list[list[Record]]:
    """By rank; the first is that of stage 3 on four ranks."""
    places = [(3, 4), *((stage, shard) for stage in stages for shard in SHARDS if (stage, shard) != (3, 4))]
    cases = [(("net", mesh(*place, reduce, precision=precision), STEPS), {"keep": owners}) for place in places]
    found = pool.run(4, runs, cases)
    for records in found:
        assert [record.seen for record in records] == [[shard] for _, shard in places]
    return found


def owners(engine: Any) -> int:
    """Over how many ranks state is cut."""
    return len({rank for unit in engine.describe().units for param in unit.parameters for rank in param.owners})


@pytest.mark.parametrize(("precision", "stages"), [("bf16", (3,)), *longer(("fp32", (1, 2)))])
def test_all_meshes_agree_bitwise_under_the_tree(pool, precision, stages):
    for first, *others in on_all_meshes(pool, "tree", precision, stages):
        assert not [differences(record, first) for record in others if differences(record, first)]


@pytest.mark.parametrize(("precision", "stages"), [("fp32", (2,)), *longer(("bf16", (1, 3)))])
def test_all_meshes_are_as_near_to_the_truth_by_default(pool, precision, stages):
    json = {"steps": STEPS, "clipping": 0.3}
    training = Training(4, micro=micro, **json)
    for records in on_all_meshes(pool, "ranks", precision, stages):
        assert all(near(record.weights, training, precision) for record in records)


def micro(model: Any, number: int, rank: int, world: int, factor: float) -> torch.Tensor:
    loss = model(*batch(1000 * rank + number, 2))
    (loss * factor).backward()
    return loss.detach()


# --- checkpoints --------------------------------------------------------------------------------------------

SHORT = [(3, 4, 2, "fp32"), (3, 2, HPZ, "bf16")]
MORE = [(1, 1, 4, "fp32"), (2, 2, 4, "fp32"), (1, 4, 2, "bf16"), (3, HPZ, 1, "fp32")]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("stage", "save", "load", "precision"), [*SHORT, *longer(*MORE)])
def test_checkpoints_go_from_any_mesh_to_any_other(tmp_path, stage, save, load, precision):
    """Two steps on one mesh, and two more on another, are four on the first."""
    first, other = (mesh(stage, shard, precision=precision) for shard in (save, load))
    whole = run("net", first, 4)
    run("net", first, 2, save=str(tmp_path))
    found = run(Model(lambda: make_net(seed=8)), other, 2, load=str(tmp_path), first=2)
    assert not differences(found, whole, "weights")
    assert (found.losses, found.norms) == (whole.losses[2:], whole.norms[2:])


# --- what is sent -------------------------------------------------------------------------------------------


def sent(shard: int) -> Counter:
    """What this rank sends in one step, by (inside a pair of ranks or between, direction of the message)."""
    engine, *_ = zero.initialize(model=make_net(), config=settings(mesh(3, shard), 4))
    step(engine, 0), step(engine, 1)  # the order of the units is known then
    counted, send = Counter(), dist.isend

    def count(tensor: torch.Tensor, group: Any, group_dst: int, tag: int) -> dist.Work:
        peer = dist.get_process_group_ranks(group)[group_dst]
        direction = ("gather", "reduce", "reduce")[(tag - comm.FIRST_TAG) % comm.TAGS % 3]
        where = "inside" if peer // 2 == dist.get_rank() // 2 else "between"
        counted[where, direction, "messages"] += 1
        counted[where, direction, "elements"] += tensor.numel()
        return send(tensor, group=group, group_dst=group_dst, tag=tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", count)
        step(engine, 2)
    counted["units"] = len(engine.describe().units)
    counted["numel"] = engine.state_nbytes().parameters  # in bytes a quarter, with padding, where four ranks share it
    engine.destroy()
    return counted


@pytest.fixture(scope="module")
def messages(pool) -> dict[int, list[Counter]]:
    return {shard: pool.run(4, sent, shard) for shard in (4, 2, HPZ)}


def test_only_sums_of_shards_travel_between_groups(messages):
    for all_ranks, two in zip(messages[4], messages[2], strict=True):
        numel, units = all_ranks["numel"], two["units"]
        assert two["between", "gather", "elements"] == 0, "parameters are gathered inside a group"
        # Of the rank's half of each gradient, half is sent to be summed, and the sum of the other half is sent back.
        assert two["between", "reduce", "elements"] == numel // 2
        assert two["between", "reduce", "messages"] == 2 * units
        assert all_ranks["between", "gather", "elements"] > 0
        assert all_ranks["between", "reduce", "elements"] == numel // 2  # two ranks' quarters


def test_between_nodes_each_unit_is_gathered_once_a_step(messages):
    for without, found in zip(messages[4], messages[HPZ], strict=True):
        numel, units = without["numel"], found["units"]
        assert found["between", "gather", "messages"] == units
        assert found["between", "gather", "elements"] == numel // 4
        assert without["between", "gather", "elements"] > 2 * numel // 4, "to two ranks there, and for some units twice"
        assert found["inside", "gather", "elements"] >= numel // 2


# --- other features on a mesh -------------------------------------------------------------------------------


def built() -> nn.Module:
    with zero.Init():
        return make_net()


@pytest.mark.parametrize("section", [OFFLOAD, *longer({})], ids=["offload", "device"])
def test_other_features_do_what_they_do_on_all_meshes(pool, section):
    """Built under `zero.Init`, two micro-batches for a step, replicas compared at every step, a checked order."""
    more = {"check_replicas": 1, "check_order": True, "recompute": {"modules": ["Block"]}}
    shards = (4, HPZ) if section else (4, 2, 1, HPZ)
    wanted, *others = (
        scenario(pool, built, mesh(3, shard, section=section, zero=more), 4, 2, accumulation=2) for shard in shards
    )
    for records in others:
        for found, record in zip(records, wanted, strict=True):
            assert not differences(found, record)


def refuse(module: Any, args: Any) -> None:
    raise ValueError("bad batch")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shard", [2, *longer(HPZ)], ids=["HSDP", "hpZ"])
def test_a_rank_that_fails_is_named_in_all_groups(shard):
    engine, *_ = zero.initialize(model=make_net(), config=settings(mesh(3, shard), 4))
    step(engine, 0)
    own = dist.get_rank() == 3
    if own:
        engine.module.blocks[1].register_forward_pre_hook(refuse)
    with pytest.raises((RuntimeError, ValueError)) as error:
        step(engine, 1), step(engine, 2)
    assert ("" if own else "rank 3 raised ValueError: ") + "bad batch" in str(error.value)
