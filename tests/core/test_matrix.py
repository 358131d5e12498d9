"""The promise: stages 0 to 3 in fp32, bf16 and fp16 agree with plain torch, whatever the model does.

Every model of the matrix trains on real ranks under every stage. Stages agree bitwise, as do ranks. The oracle is
plain torch in one process on all ranks' data: in fp64, and in the precision itself (16 bit: a 16-bit copy of fp32
masters, gradients summed in fp32). Our error against fp64 is at most twice that of the plain run in the same precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import allowed, error, twice
from matrix_models import CASES, UNITS, build, inputs, loss_of
from models import config

import zero

STAGES = (0, 1, 2, 3)
STEPS = 3  # of the optimizer
SCALE = 256.0  # the loss scale of fp16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

PRECISIONS = ["fp32", "bf16", "fp16"]
# Three ranks: a sum that rounds at every addition, and shards that cut parameters elsewhere.
AT_THREE = ["Experts", "RankExperts", "RankEncoder", "DictOutput"]

Params = dict[str, torch.Tensor]


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


def plain(name: str, world: int, precision: str, exact: bool, optimizer: Callable[..., Any] | None = None) -> Params:
    """The same training without an engine: parameters at the end, rounded to the precision unless `exact` (fp64).

    Gradients are added up in the order of the engine: ranks first, then micro-batches, then the mean.
    """
    dtype = torch.float64 if exact else torch.float32
    half = precision != "fp32" and not exact
    masters = build(name).to(dtype)
    model = build(name).to(DTYPES[precision]) if half else masters
    scale = SCALE if half and precision == "fp16" else 1.0
    trained = [key for key, param in masters.named_parameters() if param.requires_grad]
    mine, theirs = dict(masters.named_parameters()), dict(model.named_parameters())
    make = optimizer or (lambda params: torch.optim.AdamW(params, **config(0, 2)["optimizer"]["params"]))
    stepper = make([mine[key] for key in trained])
    accumulation = CASES[name].accumulation
    for step in range(STEPS):
        total = {key: torch.zeros_like(mine[key]) for key in trained}
        for micro in range(step * accumulation, (step + 1) * accumulation):
            ranks = {key: torch.zeros_like(mine[key]) for key in trained}
            for rank in range(world):
                x = inputs(micro, rank).to(next(iter(theirs.values())).dtype)
                (loss_of(model(x, rank, micro)) * scale).backward()
                for key in trained:
                    if theirs[key].grad is not None:
                        ranks[key] += theirs[key].grad.to(dtype) / scale
                        theirs[key].grad = None
            for key in trained:
                total[key] += ranks[key]
        for key in trained:
            mine[key].grad = total[key] / (world * accumulation)
        stepper.step()
        stepper.zero_grad()
        if half:
            with torch.no_grad():
                for key in trained:
                    theirs[key].copy_(mine[key])
    return {key: param.detach() for key, param in theirs.items()}


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
    exact = plain(name, world, precision, True)
    limit = allowed(exact, *twice(lambda: plain(name, world, precision, False)))
    assert error(first["params"], exact) <= limit
    start = dict(build(name).named_parameters())
    assert any(not torch.equal(first["params"][key], value) for key, value in start.items()), "nothing was learnt"
    for key, param in start.items():
        if not param.requires_grad:
            assert torch.equal(first["params"][key], param.to(DTYPES[precision])), f"'{key}' is frozen and moved"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks(pool, name, precision):
    check(pool, name, 2, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", AT_THREE)
def test_three_ranks(pool, name, precision):
    check(pool, name, 3, precision)


SGD = {"type": "SGD", "params": {"lr": 0.125}}  # a power of two: lr * gradient rounds nowhere


def test_gradients_of_a_dict_output_are_divided_by_the_accumulation_count_once(pool):
    """Two ranks, four micro-batches, plain SGD, no clipping: the very bits of plain torch."""
    wanted = plain("DictOutput", 2, "fp32", False, lambda params: torch.optim.SGD(params, lr=0.125))
    for stages in pool.run(2, run_stages, "DictOutput", "fp32", {"optimizer": SGD}):
        for stage, result in enumerate(stages):
            for key, value in wanted.items():
                assert torch.equal(result["params"][key], value), f"stage {stage}: '{key}'"


def test_the_default_order_of_sums_divides_once_too(pool):
    """Stages 0 and 1 add micro-batches up before ranks: other roundings, the same mean."""
    exact = plain("DictOutput", 2, "fp32", True)
    limit = allowed(exact, *twice(lambda: plain("DictOutput", 2, "fp32", False)))
    for stages in pool.run(2, run_stages, "DictOutput", "fp32", {"zero": {}}):
        for stage, result in enumerate(stages):
            assert error(result["params"], exact) <= limit, f"stage {stage}"
