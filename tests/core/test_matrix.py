"""The promise: stages 0 to 3 in fp32, bf16 and fp16 agree with plain torch, whatever the model does.

Every model of the matrix trains on real ranks under every stage. Stages agree bitwise, as do ranks. The oracle is
plain torch in one process on all ranks' data: in fp64, and in the precision itself (16 bit: a 16-bit copy of fp32
masters, gradients summed in fp32). Our error against fp64 is at most twice that of the plain run in the same precision.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from marks import each_once
from matrix_models import CASES, UNITS, build, inputs, loss_of
from oracle import Training, backward, near
from scenario import Model, Record, differences, runs

STEPS = 3  # of the optimizer
SCALE = 256.0  # the loss scale of fp16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Three ranks: a sum that rounds at every addition, and shards that cut parameters elsewhere.
AT_THREE = ["Experts", "RankEncoder"]


def given(precision: str, number: int, part: int) -> tuple[torch.Tensor, int, int]:
    return inputs(number, part).to(DTYPES[precision]), part, number


def loop(engine: Any, number: int, args: tuple[Any, ...]) -> torch.Tensor:
    engine.backward(loss := loss_of(engine(*args)))
    return loss


def stages(pool: Any, name: str, world: int, precision: str) -> list[list[Record]]:
    """Records by rank, then by stage."""
    model = Model(functools.partial(build, name), functools.partial(given, precision))
    json = {
        "accumulation": CASES[name].accumulation,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "loss_scale": SCALE},
        # The first makes one order of sums of all stages.
        "zero": {"reduce_every_micro_batch": True, "units": UNITS.get(name, [])},
    }
    cases = [((model, {"stage": stage, **json}), {"steps": STEPS, "loop": loop}) for stage in range(4)]
    return pool.run(world, runs, cases)


def micro(model: Any, number: int, rank: int, world: int, factor: float) -> torch.Tensor:
    x = inputs(number, rank).to(next(model.parameters()).dtype)
    return backward(loss_of(model(x, rank, number)), factor)


@functools.cache
def training(name: str, world: int) -> Training:
    return Training(world, STEPS, CASES[name].accumulation, build=lambda: build(name), micro=micro, scale=SCALE)


@pytest.mark.parametrize(
    ("name", "precision", "world"),
    [*each_once(list(CASES), list(DTYPES), [2]), *each_once(AT_THREE, [*DTYPES][::-1], [3])],
)
def test_stages_agree_with_each_other_and_with_plain_torch(pool, name, precision, world):
    ranks = stages(pool, name, world, precision)
    first = ranks[0][0]
    for rank, records in enumerate(ranks):
        for stage, record in enumerate(records):
            differs = [*differences(record, records[0], "losses"), *differences(record, first, "norms", "weights")]
            assert not differs, f"{name}, {precision}, {world} ranks: stage {stage}, rank {rank}"
    assert near(first.weights, training(name, world), precision)
    start = dict(build(name).named_parameters())
    assert any(not torch.equal(first.weights[key], value) for key, value in start.items()), "nothing was learnt"
    for key, param in start.items():
        if not param.requires_grad:
            assert torch.equal(first.weights[key], param.to(DTYPES[precision])), f"'{key}' is frozen and moved"
