"""The promise: compiled blocks give the numbers of plain ones on every stage, and are compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import batch, config, make_net, share
from torch._dynamo.utils import counters

import zero

BLOCKS = 10  # more than dynamo recompiles one function for


def trained(stage: int, backend: str | None, dtype: str = "fp32") -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    settings = config(stage, dist.get_world_size(), bf16={"enabled": dtype == "bf16"})
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


def both(stage: int, backend: str, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return trained(stage, None, dtype), trained(stage, backend, dtype)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (3, "bf16"), *longer((0, "fp32"), (2, "bf16"), (3, "fp32"))])
def test_compiled_blocks_give_the_same_bits(pool, stage, dtype):
    for eager, compiled in pool.run(2, both, stage, "aot_eager", dtype):
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
