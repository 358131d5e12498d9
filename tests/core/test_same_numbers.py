"""The promise: the same seed and data give the same numbers on every stage, and those of plain torch.

Stages are compared bitwise. With plain torch as the oracle the order of sums differs, so there the yardstick
is fp64: our error against it is at most twice the error that plain torch has in the same precision (closeness.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import allowed, error, twice, ulps
from marks import each_once, longer
from models import batch, config, equal, make_net, train
from oracle import Training, exact, near
from oracle import train as plain_train
from torch import nn

STAGES = (0, 1, 2, 3)
STEPS = 6


def settings(stage: int, world: int, accumulation: int, clipping: float, bf16: bool, every: bool) -> dict[str, Any]:
    return config(
        stage,
        world,
        accumulation=accumulation,
        gradient_clipping=clipping,
        bf16={"enabled": bf16},
        zero={"reduce_every_micro_batch": every},
    )


def run_stages(
    world: int, accumulation: int, clipping: float, bf16: bool, every: bool, steps: int = STEPS
) -> list[dict[str, Any]]:
    return [train(make_net(), world, settings(s, world, accumulation, clipping, bf16, every), steps) for s in STAGES]


# World, micro-batches of a step, clipping, bf16: every pair, and among the long ones every triple at two ranks.
CASES = [
    *((2, 1, 0.0, False), (2, 3, 0.3, False), (2, 3, 0.0, True), (2, 1, 0.3, True)),
    *((1, 1, 0.3, False), (3, 3, 0.3, True), (3, 1, 0.0, False), (4, 3, 0.3, False)),
    *longer((2, 1, 0.3, False), (2, 3, 0.0, False), (2, 3, 0.3, True), (1, 3, 0.0, True), (1, 1, 0.0, False)),
    *longer((3, 1, 0.3, False), (3, 3, 0.0, False), (4, 3, 0.3, True)),
]


@pytest.mark.parametrize(("world", "accumulation", "clipping", "bf16"), CASES)
def test_stages_agree_bitwise_and_with_plain_torch(pool, world, accumulation, clipping, bf16):
    # With accumulation, only a reduction after every micro-batch on all stages fixes one order of sums.
    ranks = pool.run(world, run_stages, world, accumulation, clipping, bf16, accumulation > 1)
    for stages in ranks:
        for stage in STAGES[1:]:
            assert equal(stages[stage], stages[0]), f"stage {stage} differs from stage 0"
        assert all(torch.equal(stages[0]["params"][name], value) for name, value in ranks[0][0]["params"].items()), (
            "ranks ended with different parameters"
        )
    losses = torch.tensor([stages[0]["losses"] for stages in ranks], dtype=torch.float64).T
    training = Training(world, STEPS, accumulation, clipping)
    assert near(ranks[0][0]["params"], training, "bf16" if bf16 else "fp32", losses)
    assert losses[-1].mean() < losses[0].mean(), "nothing was learnt"


def test_the_yardstick_has_a_floor_and_no_holes():
    exact = {"small": torch.tensor([0.5]), "large": torch.tensor([1.0, -4.0]), "none": torch.zeros(0)}
    assert error(exact, exact) == 0.0
    assert allowed(exact, exact) == allowed(exact) == 8 * 4 * 2.0**-23, "plain runs may be right by luck"
    far = {**exact, "small": torch.tensor([0.25])}
    assert (error(far, exact), allowed(exact, far, exact)) == (0.25, 0.5)
    assert not error({**far, "large": torch.tensor([1.0, torch.nan])}, exact) <= allowed(exact, far)
    with pytest.raises(ValueError, match="longer"):
        error([1.0], [1.0, 2.0])

    def plain() -> dict[str, torch.Tensor]:
        return plain_train(Training(1, 2), "fp32").params

    once, again = twice(plain)
    assert error(once, plain()) == 0, "only the second run has other roundings"
    assert ulps(0.1, once) < error(again, once) < ulps(100, once)


@pytest.mark.parametrize("world", [2, 3])
def test_reducing_at_the_boundary_agrees_in_pairs(pool, world):
    """By default stages 0 and 1 add micro-batches before ranks, stages 2 and 3 after: one order for each pair."""
    for stages in pool.run(world, run_stages, world, 3, 0.3, False, False, 4):
        assert equal(stages[0], stages[1])
        assert equal(stages[2], stages[3])
        for found in (stages[0], stages[2]):
            assert near(found["params"], Training(world, 4, 3, 0.3))


def run_ddp_twice(world: int) -> list[dict[str, Any]]:
    return twice(lambda: run_ddp(world))


def run_ddp(world: int) -> dict[str, Any]:
    """DistributedDataParallel + torch.optim.AdamW, the same data."""
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(make_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        tokens, targets = batch(step, 2 * world)
        model(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.module.named_parameters()}


def test_as_near_to_the_truth_as_ddp(pool):
    truth = exact(Training(2, STEPS)).params
    ddp = pool.run(2, run_ddp_twice, 2)[0]
    ours = pool.run(2, train_stage_3)[0]
    assert error(ours, truth) <= allowed(truth, *ddp)


def train_stage_3() -> dict[str, torch.Tensor]:
    return train(make_net(), 2, settings(3, 2, 1, 0.0, False, False), STEPS)["params"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "bf16"), each_once(["SGD", "Lion", "Adagrad", "RMSprop", "NAdam"], [False, True]))
def test_every_optimizer_runs_on_shards(kind, bf16):
    """Any element-wise optimizer, ours or torch's, gives on shards, bitwise, what our unsharded stage 0 gives."""
    chosen = {"type": kind, "params": {"lr": 1e-2}}
    more = {"optimizer": chosen, "gradient_clipping": 1.0, "bf16": {"enabled": bf16}}
    found = [train(make_net(), 2, config(stage, 2, **more), steps=3) for stage in (0, 3)]
    assert equal(found[0], found[1])
    assert found[0]["losses"][-1] != found[0]["losses"][0]
