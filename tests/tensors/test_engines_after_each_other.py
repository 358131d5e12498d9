"""The promise: a model that is cut goes from one engine to the next, also where one could not be made."""

from __future__ import annotations

import copy
import gc
import importlib
import io
from typing import Any

import pytest
import torch
from cut_models import Integers, full, integers, json_of
from marks import longer
from ranks import said_by

import zero

pytestmark = pytest.mark.ranks(2)


def weights() -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in Integers().named_parameters()}


@pytest.mark.parametrize("stage", [3, *longer(0)])
def test_what_fails_behind_the_cut_leaves_no_part_undone(stage: int) -> None:
    module: Any = importlib.import_module("zero.engine.initialize")
    model, plain = Integers(), module._wrap

    def fails(*args: Any) -> Any:
        raise RuntimeError("once")

    module._wrap = fails
    try:
        assert "once" in said_by(lambda: zero.initialize(model=model, config=json_of(2, stage)))
    finally:
        module._wrap = plain
    engine, *_ = zero.initialize(model=model, config=json_of(2, stage))
    assert all(torch.equal(value, weights()[name]) for name, value in full(engine).items())
    engine.backward(engine(**integers(0, 0)))
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("stage", [3, *longer(0)])
def test_an_engine_that_was_dropped(stage: int) -> None:
    model = Integers()
    engine, *_ = zero.initialize(model=model, config=json_of(2, stage))
    assert engine(**integers(0, 0)).item() == Integers()(**integers(0, 0)).item()
    del engine
    gc.collect()
    engine, *_ = zero.initialize(model=model, config=json_of(2, stage))
    assert all(torch.equal(value, weights()[name]) for name, value in full(engine).items())
    loss = engine(**integers(0, 0))
    assert loss.item() == Integers()(**integers(0, 0)).item()
    engine.backward(loss)
    engine.step()
    engine.destroy()
    assert model.blocks[0].mlp.up_proj.weight.shape == Integers().blocks[0].mlp.up_proj.weight.shape


def test_the_whole_model_trains_on_over_other_ranks() -> None:
    model = Integers()
    for tp in (2, 1, 2):
        engine, *_ = zero.initialize(model=model, config=json_of(tp, 1))
        engine.backward(engine(**integers(0, 0)))
        engine.destroy()
    assert all(torch.equal(param, weights()[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("stage", [3, *longer(0)])
def test_copies_and_state_dicts_of_parts(stage: int) -> None:
    """Each would look like the model's own, with a part of some weights."""
    engine, *_ = zero.initialize(model=Integers(), config=json_of(2, stage))
    assert "'blocks.0.attn.q_proj.weight' (12, 8), which is cut over 2 ranks" in said_by(engine.module.state_dict)
    for said in (
        said_by(lambda: copy.deepcopy(engine.module)),
        said_by(lambda: torch.save(engine.module, io.BytesIO())),
    ):
        assert "a copy of Integers, whose layers are divided among 2 ranks" in said
    whole = engine.module_state_dict()
    assert all(torch.equal(whole[name], value) for name, value in weights().items())
    engine.destroy()
    assert all(torch.equal(engine.module.state_dict()[name], value) for name, value in weights().items())
    copy.deepcopy(engine.module).load_state_dict(whole)
