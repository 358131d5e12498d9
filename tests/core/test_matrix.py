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
import torch.distributed as dist
from marks import each_once
from matrix_models import CASES, UNITS, build, inputs, loss_of
from models import config
from oracle import Training, backward, near, train

import zero

STAGES = (0, 1, 2, 3)
STEPS = 3  # of the optimizer
SCALE = 256.0  # the loss scale of fp16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

PRECISIONS = ["fp32", "bf16", "fp16"]
# Three ranks: a sum that rounds at every addition, and shards that cut parameters elsewhere.
AT_THREE = ["Experts", "RankExperts", "RankEncoder", "DictOutput"]


def settings(name: str, stage: int, world: int, precision: str, **more: Any) -> dict[str, Any]:
    return config(
        stage,
        world,
        accumulation=CASES[name].accumulation,
        **{
            "bf16": {"enabled": precision == "bf16"},
            "fp16": {"enabled": precision == "fp16", "loss_scale": SCALE},
            # The first makes one order of sums of all stages.
            "zero": {"reduce_every_micro_batch": True, "units": UNITS.get(name, [])},
            **more,
        },
    )


def run(name: str, stage: int, precision: str, **more: Any) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(name)
    engine, *_ = zero.initialize(model=model, config=settings(name, stage, world, precision, **more))
    losses = []
    for step in range(STEPS * CASES[name].accumulation):
        loss = loss_of(engine(inputs(step, rank).to(DTYPES[precision]), rank, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    params = {key: param.detach() for key, param in model.named_parameters()}
    return {"losses": losses, "params": params, "norm": engine.get_global_grad_norm()}


def run_stages(name: str, precision: str, more: dict[str, Any]) -> list[dict[str, Any]]:
    return [run(name, stage, precision, **more) for stage in STAGES]


def micro(model: Any, number: int, rank: int, world: int, factor: float) -> torch.Tensor:
    x = inputs(number, rank).to(next(model.parameters()).dtype)
    return backward(loss_of(model(x, rank, number)), factor)


@functools.cache
def training(name: str, world: int) -> Training:
    return Training(world, STEPS, CASES[name].accumulation, build=lambda: build(name), micro=micro, scale=SCALE)


def check(pool: Any, name: str, world: int, precision: str) -> None:
    stages = pool.run(world, run_stages, name, precision, {})
    first = stages[0][0]
    for rank, results in enumerate(stages):
        for stage, result in enumerate(results):
            place = f"{name}, {precision}, {world} ranks: stage {stage}, rank {rank}"
            assert result["losses"] == results[0]["losses"], f"{place}: another loss than stage 0"
            assert result["norm"] == first["norm"], f"{place}: another gradient norm"
            for key, value in result["params"].items():
                assert torch.equal(value, first["params"][key]), f"{place}: '{key}' differs from stage 0, rank 0"
    assert near(first["params"], training(name, world), precision)
    start = dict(build(name).named_parameters())
    assert any(not torch.equal(first["params"][key], value) for key, value in start.items()), "nothing was learnt"
    for key, param in start.items():
        if not param.requires_grad:
            assert torch.equal(first["params"][key], param.to(DTYPES[precision])), f"'{key}' is frozen and moved"


@pytest.mark.parametrize(("name", "precision"), each_once(list(CASES), PRECISIONS))
def test_two_ranks(pool, name, precision):
    check(pool, name, 2, precision)


@pytest.mark.parametrize(("name", "precision"), each_once(AT_THREE, PRECISIONS[::-1]))
def test_three_ranks(pool, name, precision):
    check(pool, name, 3, precision)


SGD = {"type": "SGD", "params": {"lr": 0.125}}  # a power of two: lr * gradient rounds nowhere


def test_gradients_of_a_dict_output_are_divided_by_the_accumulation_count_once(pool):
    """Two ranks, four micro-batches, plain SGD, no clipping: the very bits of plain torch."""
    by_sgd = training("DictOutput", 2)._replace(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.125))
    wanted = train(by_sgd, "fp32").params
    for stages in pool.run(2, run_stages, "DictOutput", "fp32", {"optimizer": SGD}):
        for stage, result in enumerate(stages):
            for key, value in wanted.items():
                assert torch.equal(result["params"][key], value), f"stage {stage}: '{key}'"


def test_the_default_order_of_sums_divides_once_too(pool):
    """Stages 0 and 1 add micro-batches up before ranks: other roundings, the same mean."""
    for stages in pool.run(2, run_stages, "DictOutput", "fp32", {"zero": {}}):
        for stage, result in enumerate(stages):
            assert near(result["params"], training("DictOutput", 2)), f"stage {stage}"
