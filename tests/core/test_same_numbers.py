"""The promise: the same seed and data give the same numbers on every stage, and those of plain torch.

Stages are compared bitwise. With plain torch as the oracle the order of sums differs, so there the yardstick
is fp64: our error against it is at most twice the error that plain torch has in the same precision (closeness.py).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import allowed, error, twice, ulps
from models import batch, config, make_net, reference, train
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


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    same = all(torch.equal(first["params"][name], second["params"][name]) for name in second["params"])
    return same and first["losses"] == second["losses"] and first["norms"] == second["norms"]


# World, micro-batches of a step, clipping, bf16: every triple at two ranks, every pair at the others.
CASES = [
    *itertools.product((2,), (1, 3), (0.0, 0.3), (False,)),
    *itertools.product((2,), (1, 3), (0.3,), (True,)),
    *((1, 1, 0.0, False), (1, 3, 0.3, False), (1, 1, 0.3, True)),
    *((3, 1, 0.3, False), (3, 3, 0.0, False), (3, 3, 0.3, True)),
    *((4, 3, 0.3, False), (4, 3, 0.3, True)),
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
    wanted = settings(0, world, accumulation, clipping, bf16, True)
    exact = reference(make_net(), world, wanted, torch.float64, STEPS)
    plain = twice(lambda: reference(make_net(), world, wanted, torch.float32, STEPS, bf16))
    for run in plain if bf16 else ():
        run["params"] = {name: value.bfloat16() for name, value in run["params"].items()}
    ours = ranks[0][0]
    assert error(ours["params"], exact["params"]) <= allowed(exact["params"], *(run["params"] for run in plain))
    losses = torch.tensor([stages[0]["losses"] for stages in ranks], dtype=torch.float64).T
    assert error(losses, exact["losses"]) <= allowed(exact["losses"], *(run["losses"] for run in plain))
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
        return reference(make_net(), 1, settings(0, 1, 1, 0.0, False, False), torch.float32, 2)["params"]

    once, again = twice(plain)
    assert error(once, plain()) == 0, "only the second run has other roundings"
    assert ulps(0.1, once) < error(again, once) < ulps(100, once)


@pytest.mark.parametrize("world", [2, 3])
def test_reducing_at_the_boundary_agrees_in_pairs(pool, world):
    """By default stages 0 and 1 add micro-batches before ranks, stages 2 and 3 after: one order for each pair."""
    wanted = settings(0, world, 3, 0.3, False, False)
    exact = reference(make_net(), world, wanted, torch.float64, 4)["params"]
    limit = allowed(exact, *twice(lambda: reference(make_net(), world, wanted, torch.float32, 4)["params"]))
    for stages in pool.run(world, run_stages, world, 3, 0.3, False, False, 4):
        assert equal(stages[0], stages[1])
        assert equal(stages[2], stages[3])
        for found in (stages[0], stages[2]):
            assert error(found["params"], exact) <= limit


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
    wanted = settings(3, 2, 1, 0.0, False, False)
    exact = reference(make_net(), 2, wanted, torch.float64, STEPS)["params"]
    ddp = pool.run(2, run_ddp_twice, 2)[0]
    ours = pool.run(2, train_stage_3)[0]
    assert error(ours, exact) <= allowed(exact, *ddp)


def train_stage_3() -> dict[str, torch.Tensor]:
    return train(make_net(), 2, settings(3, 2, 1, 0.0, False, False), STEPS)["params"]


@pytest.mark.parametrize("kind", ["SGD", "Lion", "Adagrad", "RMSprop", "NAdam"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_every_optimizer_runs_on_shards(pool, kind, bf16):
    """Any element-wise optimizer, ours or torch's, gives on shards, bitwise, what our unsharded stage 0 gives."""
    for found in pool.run(2, run_optimizer, kind, bf16):
        assert equal(found[0], found[1])
        assert found[0]["losses"][-1] != found[0]["losses"][0]


def run_optimizer(kind: str, bf16: bool) -> list[dict[str, Any]]:
    chosen = {"type": kind, "params": {"lr": 1e-2}}
    more = {"optimizer": chosen, "gradient_clipping": 1.0, "bf16": {"enabled": bf16}}
    return [train(make_net(), 2, config(stage, 2, **more), steps=3) for stage in (0, 3)]
