"""The promise: `engine.describe()` says of each parameter which rank has which elements, and where they rest."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import config, make_net

import zero
from zero.utils import safe_get_local_fp32_param

HOST = {"device": "cpu", "pin_memory": False}


@pytest.mark.ranks(2)
def test_the_elements_that_it_names_are_those_that_the_rank_updates() -> None:
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2))
    named, values = dict(engine.module.named_parameters()), dict(make_net().named_parameters())
    owned = {name: torch.zeros(value.numel()) for name, value in values.items()}
    for one in (one for unit in engine.describe().units for one in unit.parameters):
        piece = safe_get_local_fp32_param(named[one.name])
        if (span := one.owners.get(dist.get_rank())) is not None:
            owned[one.name][span.start : span.stop] = 1
            assert torch.equal(piece.flatten(), values[one.name].flatten()[span.start : span.stop])
    assert sum(one.sum() for one in owned.values()) > 0
    for one in owned.values():
        dist.all_reduce(one)
        assert one.eq(1).all(), "each element has one owner"
    engine.destroy()


def test_shapes_placements_and_state_are_said() -> None:
    model = make_net()
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    for param in model.blocks[0].parameters():
        param.requires_grad_(False)
    settings = config(3, 1, zero_optimization={"stage": 3, "offload_optimizer": HOST, "offload_param": HOST})
    engine, *_ = zero.initialize(model=model, config=settings)
    found = engine.describe()
    assert {one.name: one.shape for unit in found.units for one in unit.parameters} == shapes
    frozen, trained = found.units[1], found.units[2]
    assert (frozen.name, frozen.optimizer, frozen.params) == ("blocks.0", "none", "host")
    assert (trained.name, trained.optimizer, trained.group, trained.state) == ("blocks.1", "host", 0, "sharded")
    text = str(found)
    assert "blocks.1: 661 x fp32, cut, sharded, parameters: host; group 0, optimizer state: host" in text
    assert "    blocks.1.up.weight    25x12         rank 0 [0:300]" in text
    assert "not updated" in text
    engine.destroy()


@pytest.mark.ranks(2)
def test_at_stage_0_each_rank_has_all_of_it() -> None:
    engine, *_ = zero.initialize(model=make_net(), config=config(0, 2))
    for unit in engine.describe().units:
        assert (unit.cut, unit.params, unit.optimizer) == (False, "device", "device")
        for one in unit.parameters:
            assert one.owners == {dist.get_rank(): (0, torch.Size(one.shape).numel())}
    engine.destroy()
