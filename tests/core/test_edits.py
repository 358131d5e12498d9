"""The promise: what a user writes into a parameter is its exact value from then on, on every stage."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from marks import each_once
from models import config, make_net
from scenario import Record, differences, run
from torch import nn

import zero
from zero.utils import safe_get_full_fp32_param

FILLED, COPIED, LATE = "blocks.1.up.weight", "embed.weight", "head.bias"


def trained(stage: int, master: str, **more: Any) -> Record:
    """After two steps no master is what its parameter says any more. `master` "" computes in fp32."""
    params = {"lr": 1e-2, "weight_decay": 0.1, "zero": {"master": master or "fp32"}}
    json = {"stage": stage, "precision": "bf16" if master else "fp32", "optimizer": {"type": "AdamW", "params": params}}
    return run("net", json, **{"steps": 2, **more})


def exact(engine: Any) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}


def write(engine: Any) -> dict[str, torch.Tensor]:
    """Edit three parameters as users do, where they are cut inside of a block; the values that must be exact."""
    params = {name: engine.module.get_parameter(name) for name in (FILLED, COPIED, LATE)}
    filled, copied, late = params.values()
    cut = engine.zero_optimization_stage() == 3
    with torch.no_grad(), zero.GatheredParameters(params.values(), modifier_rank=0, enabled=cut):
        nn.init.normal_(filled, generator=torch.Generator().manual_seed(3))
        copied[1:3].copy_(torch.full_like(copied[1:3], 0.3))
        late.add_(0.1)
    with zero.GatheredParameters(params.values()):
        return {name: param.detach().float().clone() for name, param in params.items()}


def edited_before_the_third(look: bool, engine: Any, number: int, args: Any) -> torch.Tensor:
    """With `look`, masters are read around the edits, which must not matter."""
    if number == 2:
        before = exact(engine) if look else {}
        wanted = before | write(engine)
        assert not look or all(torch.equal(value, wanted[name]) for name, value in exact(engine).items())
    engine.backward(loss := engine(*args))
    return loss


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "masters"), each_once([2, 1], [("fp32", "remainder"), ("",)]))
def test_an_edit_is_exact_and_the_next_step_begins_there(world, masters):
    loops = [functools.partial(edited_before_the_third, look) for look in (True, False)]
    first, *others = [
        trained(stage, master, steps=4, loop=loop) for stage in range(4) for master in masters for loop in loops
    ]
    assert not any(differences(found, first, "weights") for found in others)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "master"), each_once([0, 1, 2], ["fp32", "remainder"]))
def test_a_loaded_state_dict_is_exact(stage, master):
    values = {name: value.bfloat16() for name, value in make_net(seed=9).state_dict().items()}

    def loaded(engine: Any) -> bool:
        engine.module.load_state_dict(values)
        return all(torch.equal(value, values[name].float()) for name, value in exact(engine).items())

    assert trained(stage, master, keep=loaded).seen == [True]


def through_data(engine: Any) -> tuple[float, float]:
    """How far the master is from what was written through `.data`, and from what it was before."""
    before = exact(engine)[LATE]
    engine.module.get_parameter(LATE).data.fill_(3.0)
    now = exact(engine)[LATE]
    return (now - 3.0).abs().max().item(), (now - before).abs().max().item()


@pytest.mark.ranks(1)
def test_writes_through_data_are_seen_by_remainders_only():
    """As the documentation says: `.data` goes around the counters that we look at."""
    (near, _), (_, moved) = (trained(1, master, keep=through_data).seen[0] for master in ("remainder", "fp32"))
    assert near <= 2**-7  # half a bf16 step at 3
    assert moved == 0.0


def test_a_frozen_parameter_that_got_other_data_is_saved_with_it(tmp_path):
    found = []
    for value in (4.0, None):
        model = torch.nn.Linear(2, 2)
        model.bias.requires_grad_(False)
        engine = zero.initialize(model=model, config=config(1, 1))[0]
        if value is not None:
            model.bias.data = torch.full((2,), value)
            engine.save_checkpoint(tmp_path)
        else:
            engine.load_checkpoint(tmp_path)
        engine.destroy()
        found.append(model.bias.tolist())
    assert found == [[4.0, 4.0]] * 2
