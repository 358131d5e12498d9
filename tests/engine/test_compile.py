"""The promise: compiled blocks give the numbers of plain ones on every stage, and are compiled once."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import batch, config, make_net, share
from torch._dynamo.utils import counters

import zero

BLOCKS = 10  # more than dynamo recompiles one function for
HOST = {"device": "cpu"}
WITH: dict[str, dict[str, Any]] = {
    "nothing": {},
    "recomputation": {"zero": {"recompute": {"modules": ["Block"]}}},
    "selective recomputation": {"zero": {"recompute": {"modules": ["Block"], "policy": "selective"}}},
    "optimizer on the host": {"zero_optimization": {"offload_optimizer": HOST}},
    "all on the host": {"zero_optimization": {"offload_optimizer": HOST, "offload_param": HOST}},
    "accumulation": {"accumulation": 2},
}


def trained(stage: int, backend: str | None, dtype: str = "fp32", more: str = "nothing") -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    settings = config(stage, dist.get_world_size(), bf16={"enabled": dtype == "bf16"}, **WITH[more])
    settings["zero_optimization"]["stage"] = stage
    engine = zero.initialize(model=make_net(blocks=BLOCKS), config=settings)[0]
    if backend:
        engine.compile(backend=backend)
    losses, graphs = [], []
    for step in range(4):
        loss = engine(*share(step))
        away = sum(unit.state.value == "sharded" for unit in engine._sharded.units)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    breaks, compiled = sum(counters["graph_break"].values()), engine.is_compiled
    engine.destroy()
    params = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    plain = all("forward" not in module.__dict__ for module in engine.module.modules())
    return {
        "losses": losses,
        "graphs": graphs,
        "breaks": breaks,
        "away": away,
        "compiled": compiled,
        "params": params,
        "plain": plain,
    }


def both(stage: int, backend: str, dtype: str, more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return trained(stage, None, dtype, more), trained(stage, backend, dtype, more)


CASES = [
    *((1, "fp32", "nothing"), (3, "bf16", "nothing")),
    *longer((0, "fp32", "nothing"), (2, "bf16", "nothing"), (3, "fp32", "nothing")),
    *longer((3, "fp32", "recomputation"), (1, "fp32", "selective recomputation"), (3, "bf16", "accumulation")),
    *longer((2, "bf16", "optimizer on the host"), (3, "bf16", "all on the host")),
]


@pytest.mark.parametrize(("stage", "dtype", "more"), CASES)
def test_compiled_blocks_give_the_same_bits(pool, stage, dtype, more):
    for eager, compiled in pool.run(2, both, stage, "aot_eager", dtype, more):
        assert compiled["losses"] == eager["losses"]
        assert all(torch.equal(value, compiled["params"][name]) for name, value in eager["params"].items())
        assert compiled["graphs"][1] >= 1
        assert compiled["graphs"][1:] == [compiled["graphs"][1]] * 3, "recompiled after step 2"
        assert compiled["breaks"] == 0
        assert compiled["compiled"]
        assert not eager["compiled"]
        assert compiled["plain"]
        if stage == 3:
            assert compiled["away"] == eager["away"] >= BLOCKS - 1


@pytest.mark.ranks(2)
def test_an_engine_that_the_user_compiles_gives_the_same_bits():
    found = []
    for compiles in (False, True):
        engine = zero.initialize(model=make_net(blocks=1), config=config(3, dist.get_world_size()))[0]
        model = torch.compile(engine, backend="eager") if compiles else engine
        losses = []
        for step in range(2):
            loss = model(*batch(step, 2))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        found.append(losses)
    plain, compiled = found
    assert compiled == plain


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
@pytest.mark.ranks(2)
def test_inductor_gives_the_numbers_of_plain_blocks():
    eager, compiled = both(3, "inductor", "fp32", "recomputation")
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert compiled["graphs"][1:] == [compiled["graphs"][1]] * 3
    assert compiled["breaks"] == 0
