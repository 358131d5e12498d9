"""The promise: compiled blocks give the numbers of plain ones on every stage, and are compiled once."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from marks import longer
from models import make_net
from scenario import Model, Record, run, same
from torch._dynamo.utils import counters

from zero.core.owner import is_released

pytestmark = pytest.mark.ranks(2)
BLOCKS = 10  # more than dynamo recompiles one function for
NET = Model(lambda: make_net(blocks=BLOCKS))
RECOMPUTE = {"modules": ["Block"]}
OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
BOTH = {**OPTIMIZER, "offload_param": {"device": "cpu"}}


def trained(json: dict[str, Any], backend: str | None) -> Record:
    """A training whose blocks are compiled by a backend; `seen` are the graphs so far, and what the engine leaves."""
    torch._dynamo.reset()
    counters.clear()

    def loop(engine: Any, number: int, inputs: Any) -> torch.Tensor:
        if backend and number == 0:
            engine.compile(backend=backend)
        loss = engine(*inputs)
        if json["stage"] == 3:
            assert sum(is_released(block.up.weight) for block in engine.module.blocks) >= BLOCKS - 1
        engine.backward(loss)
        return loss

    def graphs(engine: Any, number: int) -> int:
        assert engine.is_compiled == bool(backend)
        return counters["stats"]["unique_graphs"]

    return run(NET, json, 4, loop=loop, watch=graphs, keep=lambda engine: engine.module)


def both(json: dict[str, Any], backend: str) -> tuple[Record, Record]:
    """A training as it is, and one whose blocks are compiled, once."""
    plain, compiled = trained(json, None), trained(json, backend)
    *seen, module = compiled.seen
    assert sum(counters["graph_break"].values()) == 0
    assert seen[1] >= 1
    assert seen[1:] == [seen[1]] * (len(seen) - 1), "recompiled after step 2"
    assert all("forward" not in vars(child) for child in module.modules()), "destroy() leaves a plain model"
    return plain, compiled


@pytest.mark.parametrize(
    "json",
    [
        {"stage": 3, "precision": "bf16"},
        *longer({"stage": 1, "accumulation": 2}, {"stage": 3, "zero": {"recompute": RECOMPUTE}}),
        *longer({"stage": 3, "precision": "bf16", "section": BOTH}),
    ],
    ids=str,
)
def test_compiled_blocks_give_the_same_bits(json):
    plain, compiled = both(json, "aot_eager")
    assert same(compiled, plain)


def called(compiles: bool) -> Record:
    compiled: list[Any] = []

    def loop(engine: Any, number: int, inputs: Any) -> torch.Tensor:
        if not compiled:
            compiled.append(torch.compile(engine, backend="eager") if compiles else engine)
        engine.backward(loss := compiled[0](*inputs))
        return loss

    return run(Model(lambda: make_net(blocks=1)), 3, 2, loop=loop)


def test_an_engine_that_the_user_compiles_gives_the_same_bits():
    assert same(called(True), called(False))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
def test_inductor_gives_the_numbers_of_plain_blocks():
    plain, compiled = both({"stage": 3, "zero": {"recompute": RECOMPUTE}}, "inductor")
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
