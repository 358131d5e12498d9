"""The promise: the same seed and data give the same numbers on every stage, and those of plain torch.

Stages are compared bitwise. With plain torch as the oracle the order of sums differs, so there the yardstick
is fp64: our error against it is at most twice the error that plain torch has in the same precision (closeness.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import allowed, error, twice
from marks import longer
from models import make_net
from oracle import Training, exact, near, net_backward
from scenario import differences, runs, same, scenario
from torch import nn

STEPS = 6


def stages(pool: Any, world: int, json: dict[str, Any], steps: int = STEPS, wanted: Any = range(4)) -> list[Any]:
    """Records by rank, then by stage."""
    cases = [(("dealt", {"stage": stage, **json}), {"steps": steps}) for stage in wanted]
    return pool.run(world, runs, cases)


# World, micro-batches of a step, clipping, precision: every pair of the last three.
CASES = [
    *((2, 3, 0.3, "fp32"), (2, 1, 0.3, "bf16"), (3, 1, 0.0, "fp32"), (1, 3, 0.0, "bf16")),
    *longer((3, 3, 0.3, "bf16"), (4, 3, 0.3, "fp32")),
]


@pytest.mark.parametrize(("world", "accumulation", "clipping", "precision"), CASES)
def test_stages_agree_bitwise_and_with_plain_torch(pool, world, accumulation, clipping, precision):
    # With accumulation, only a reduction after every micro-batch on all stages fixes one order of sums.
    json = {"accumulation": accumulation, "gradient_clipping": clipping, "precision": precision}
    ranks = stages(pool, world, {**json, "zero": {"reduce_every_micro_batch": accumulation > 1}})
    for records in ranks:
        for stage, record in enumerate(records):
            assert not differences(record, records[0]), f"stage {stage} differs from stage 0"
        assert same(records[0], ranks[0][0], "weights"), "ranks ended with different parameters"
    losses = torch.tensor([records[0].losses for records in ranks], dtype=torch.float64).T
    assert near(ranks[0][0].weights, Training(world, STEPS, accumulation, clipping), precision, losses)
    assert losses[-1].mean() < losses[0].mean(), "nothing was learnt"


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_each_stage_in_each_precision(pool, stage, world, precision):
    """As above, one at a time: what a GPU shows first (`make gpu PART=first`)."""
    json = {"stage": stage, "gradient_clipping": 0.3}
    if precision != "fp32":
        json[precision] = {"enabled": True, **({"loss_scale": 1024} if precision == "fp16" else {})}
    for record in scenario(pool, "dealt", json, world, STEPS):
        assert near(record.weights, Training(world, STEPS, clipping=0.3, scale=1024.0), precision)
        assert record.losses[-1] < record.losses[0], "nothing was learnt"


def test_reducing_at_the_boundary_agrees_in_pairs(pool):
    """By default stages 0 and 1 add micro-batches before ranks, stages 2 and 3 after: one order for each pair."""
    for records in stages(pool, 3, {"accumulation": 3, "gradient_clipping": 0.3}, 4):
        assert same(records[0], records[1])
        assert same(records[2], records[3])
        for record in (records[0], records[2]):
            assert near(record.weights, Training(3, 4, 3, 0.3))


def run_ddp() -> dict[str, Any]:
    """DistributedDataParallel + torch.optim.AdamW, the same data."""
    model = nn.parallel.DistributedDataParallel(make_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        net_backward(model, step, dist.get_rank(), 2, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.module.named_parameters()}


def run_ddp_twice() -> list[dict[str, Any]]:
    return twice(run_ddp)


def test_as_near_to_the_truth_as_ddp(pool):
    truth = exact(Training(2, STEPS)).params
    ((ours,), _) = stages(pool, 2, {}, wanted=[3])
    assert error(ours.weights, truth) <= allowed(truth, *pool.run(2, run_ddp_twice)[0])
