"""The promise: `zero.reduce` says who adds up gradients over NCCL, and our sum is that of fp32 in the order of ranks.

Whatever is rounded to 16 bits for the way: the same bits at every stage and however the model is cut into units. The
backend is tests/fake_nccl.py, which adds in the dtype of what it is sent, as NCCL does.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nccl import on_fake_nccl
from marks import longer
from models import config, make_net, share
from ranks import Pool
from stand_in_device import DEVICE

import zero
from zero.config import load
from zero.core.mixed_precision import MixedPrecisionPolicy
from zero.core.world import World
from zero.plan.sharding import summed_here
from zero.sizes.choice import own_choice, scheme_of
from zero.utils.full import safe_get_full_grad

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 1024}}
IN_BF16 = {"communication_data_type": "bf16"}


def plain(dtype: torch.dtype, travel: torch.dtype) -> list[list[torch.Tensor]]:
    """What each rank's gradient [of each parameter] is on the way, as plain torch makes it."""
    model = make_net().to(dtype)
    loss = model(*share(0)) * (1024 if dtype == torch.float16 else 1)
    loss.backward()
    mine = [param.grad.to(travel) for param in model.parameters()]
    found = [[torch.empty_like(grad) for _ in range(dist.get_world_size())] for grad in mine]
    for rows, grad in zip(found, mine, strict=True):
        dist.all_gather(rows, grad)
    return found


def reduced(
    stage: int, more: dict[str, Any], per_node: int, dtype: torch.dtype, travel: torch.dtype
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], set[str], int]:
    """Each parameter's sum over ranks; `plain`; what reductions were, by operation and dtype; elements that went."""
    rows, world = plain(dtype, travel), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        patch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        model = make_net()
        engine, *_ = zero.initialize(model=model, config=config(stage, world, **more))
        mesh = engine._sharded.units[0].mesh
        (axis,) = [axis for axis in (mesh.shard, mesh.replica) if axis.size > 1]
        (axis.second or axis.group).begun.clear()
        engine.backward(engine(*(part.to(DEVICE) for part in share(0))))
        scale = 1024 if dtype == torch.float16 else 1
        sums = [safe_get_full_grad(param).cpu() * world * scale for param in model.parameters()]
        begun = [text.split(" of ") for text in axis.second.begun if text.startswith(("all_to", "reduce"))]
        engine.destroy()
    ways = {f"{name} {what.split()[1]}" for name, what in begun}
    return sums, rows, ways, sum(int(what.split()[0]) for _, what in begun)


def added(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return reduce(torch.add, [row.to(dtype) for row in rows]).float()


# Options, ranks on each machine, dtypes of gradients and of messages; and who adds, in which dtype.
OURS, ITS = "all_to_all torch.", "reduce_scatter torch."
CASES = [
    (3, BF16, 4, torch.bfloat16, torch.bfloat16, OURS + "bfloat16"),
    (2, {**BF16, "zero": {"reduce": "backend"}}, 4, torch.bfloat16, torch.bfloat16, ITS + "bfloat16"),
    *longer(
        (0, BF16, 4, torch.bfloat16, torch.bfloat16, OURS + "bfloat16"),
        (1, {**BF16, "zero": {"units": ["Linear"]}}, 4, torch.bfloat16, torch.bfloat16, OURS + "bfloat16"),
        (3, BF16, 2, torch.bfloat16, torch.bfloat16, ITS + "bfloat16"),  # of two machines
        (3, {**BF16, "zero": {"reduce": "ranks"}}, 2, torch.bfloat16, torch.bfloat16, OURS + "bfloat16"),
        (2, FP16, 4, torch.float16, torch.float16, OURS + "float16"),
        (1, IN_BF16, 4, torch.float32, torch.bfloat16, OURS + "bfloat16"),
        (3, {}, 4, torch.float32, torch.float32, ITS + "float32"),
        (2, {"zero": {"reduce": "ranks"}}, 4, torch.float32, torch.float32, OURS + "float32"),
    ),
]


@pytest.mark.parametrize(("stage", "more", "per_node", "dtype", "travel", "way"), CASES)
def test_who_adds_up(
    pool: Pool, stage: int, more: dict[str, Any], per_node: int, dtype: torch.dtype, travel: torch.dtype, way: str
) -> None:
    for sums, rows, ways, elements in pool.run(4, reduced, stage, more, per_node, dtype, travel):
        assert ways == {way}
        of_model = sum(total.numel() for total in sums)
        assert of_model <= elements <= 1.5 * of_model  # once; what is more is padding
        here = [added(of_ranks, torch.float32) for of_ranks in rows]
        there = [added(of_ranks, travel) for of_ranks in rows]
        wanted = here if way.startswith(OURS) else there
        assert all(map(torch.equal, sums, wanted))
        if travel != torch.float32:
            assert not all(map(torch.equal, here, there))  # so that the above says something


@pytest.mark.parametrize(("who", "native", "resting"), [("backend", True, "bf16"), ("auto", False, "fp32")])
def test_a_sum_of_ours_rests_in_fp32(who: str, native: bool, resting: str) -> None:
    """In host memory, where NCCL's needs 16 bits; and the plan says the same of both."""
    world = World(None, 4, 0, True, summed_here=summed_here(who, True))
    assert MixedPrecisionPolicy("bf16", 1).resting_dtype(world, [world]) == resting
    settings = load({**config(2, 4, **BF16), "zero": {"reduce": who}}, 4)
    scheme = scheme_of([], settings, own_choice(settings), 1, True)
    assert (scheme.native, scheme.resting) == (native, resting)
