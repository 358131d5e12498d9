"""The promise: over NCCL, whose waits end on the device and not on the host, training is what it is over gloo.

And `zero.reduce` says who adds up gradients; our sum is that of fp32 in the order of ranks, whatever is rounded to 16
bits for the way. The backend is tests/fake_nccl.py, which adds in the dtype of what it is sent, as NCCL does: no GPU
is here. It holds against what is proven with it that it sees the mistakes.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nccl import FakeNccl, on_fake_nccl
from marks import longer
from models import make_net, share, step
from ranks import Pool
from scenario import Record, differences, run, settings

import zero
from zero.utils import safe_get_full_grad

LIMIT = 660.0  # the seconds of zero.timeout, and some until NCCL itself ends a process
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 1024}}
HPZ = {"section": {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}}


def train(fake: bool, json: dict[str, Any]) -> Record:
    if not fake:
        return run("net", json)
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        patch.setenv("LOCAL_WORLD_SIZE", str(dist.get_world_size()))  # one machine, where we add up what is in 16 bits
        return run("net", json)


CASES = [
    (2, {"stage": 0}),
    (2, {"stage": 1, **BF16}),
    (2, {"stage": 2, "accumulation": 2}),
    (2, {"stage": 3, "gradient_clipping": 0.1}),
    *longer(
        (2, {"stage": 2, "zero": {"reduce": "tree"}}),
        (2, {"stage": 3, "zero": {"check_order": True}, **BF16}),
        (2, {"stage": 3, "fp16": {"enabled": True, "initial_scale_power": 20}}),
        (4, {"stage": 3, "zero": {"reduce": "tree"}, **HPZ}),
    ),
]


@pytest.mark.parametrize(("world", "json"), CASES)
def test_every_stage_trains_as_over_gloo(pool: Pool, world: int, json: dict[str, Any]) -> None:
    """The order of a sum of two does not matter, so the bits are the same."""
    for found, wanted in zip(pool.run(world, train, True, json), pool.run(world, train, False, json), strict=True):
        assert not differences(found, wanted)


def kinds(made: FakeNccl) -> set[str]:
    return {text.split()[0] for text in made.begun}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "json", "axes"),
    [(2, {"stage": 0}, 1), (2, {"stage": 3}, 1), *longer((4, {"stage": 3, "section": {"mics_shard_size": 2}}, 2))],
)
def test_gathers_and_reductions_have_a_communicator_each(world: int, json: dict[str, Any], axes: int) -> None:
    """Along each axis of ranks."""
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        engine, *_ = zero.initialize(model=make_net(), config=settings(json, world))
        for made in FakeNccl.made:
            made.begun.clear()
        step(engine, 0)
        gathers = [made for made in FakeNccl.made if kinds(made) == {"all_gather"}]
        sums = [made for made in FakeNccl.made if kinds(made) == {"reduce_scatter"}]
        assert len(gathers) >= len(sums) == axes, "all ranks gather scalars, too"
        assert {made.timeout.total_seconds() for made in (*gathers, *sums)} == {LIMIT}
        assert {made.options for made in sums} == {"those of NCCL"}
        assert all(not kinds(made) & {"all_gather", "reduce_scatter"} for made in {*FakeNccl.made} - {*gathers, *sums})
        engine.destroy()


# --- who adds up --------------------------------------------------------------------------------------------


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


def added(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return reduce(torch.add, [row.to(dtype) for row in rows]).float()


# JSON, ranks on each machine, dtypes of gradients and of messages; and who adds, in which dtype.
HALF, WIDE = torch.bfloat16, torch.float32
OURS, ITS = "all_to_all torch.", "reduce_scatter torch."
ADDED = [
    ({"stage": 3, **BF16}, 4, HALF, HALF, OURS + "bfloat16"),
    ({"stage": 2, **BF16, "zero": {"reduce": "backend"}}, 4, HALF, HALF, ITS + "bfloat16"),
    *longer(
        ({"stage": 0, **BF16}, 4, HALF, HALF, OURS + "bfloat16"),
        ({"stage": 1, **BF16, "zero": {"units": ["Linear"]}}, 4, HALF, HALF, OURS + "bfloat16"),
        ({"stage": 3, **BF16}, 2, HALF, HALF, ITS + "bfloat16"),  # of two machines
        ({"stage": 3, **BF16, "zero": {"reduce": "ranks"}}, 2, HALF, HALF, OURS + "bfloat16"),
        ({"stage": 2, **FP16}, 4, torch.float16, torch.float16, OURS + "float16"),
        ({"stage": 1, "communication_data_type": "bf16"}, 4, WIDE, HALF, OURS + "bfloat16"),
        ({"stage": 3}, 4, WIDE, WIDE, ITS + "float32"),
        ({"stage": 2, "zero": {"reduce": "ranks"}}, 4, WIDE, WIDE, OURS + "float32"),
    ),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("json", "per_node", "dtype", "travel", "way"), ADDED)
def test_who_adds_up(json: dict[str, Any], per_node: int, dtype: torch.dtype, travel: torch.dtype, way: str) -> None:
    rows, scale = plain(dtype, travel), 1024 if dtype == torch.float16 else 1
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        patch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        engine, *_ = zero.initialize(model=make_net(), config=settings(json, 4))
        for made in FakeNccl.made:
            made.begun.clear()
        engine.backward(engine(*share(0)))
        sums = [safe_get_full_grad(param).cpu() * 4 * scale for param in engine.module.parameters()]
        texts = [text for made in FakeNccl.made for text in made.begun if text.startswith(("all_to", "reduce"))]
        engine.destroy()
    begun = [(name, *what.split()) for name, what in (text.split(" of ") for text in texts)]
    assert {f"{name} {kind}" for name, _, kind in begun} == {way}
    of_model = sum(total.numel() for total in sums)
    assert of_model <= sum(int(numel) for _, numel, _ in begun) <= 1.5 * of_model  # once; what is more is padding
    here = [added(of_ranks, torch.float32) for of_ranks in rows]
    there = [added(of_ranks, travel) for of_ranks in rows]
    assert all(map(torch.equal, sums, here if way.startswith(OURS) else there))
    if travel != torch.float32:
        assert not all(map(torch.equal, here, there))  # so that the above says something
