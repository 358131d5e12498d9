"""The promise: a rank without tokens takes part: of its experts or in its batch, for as many steps as there are."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import integers, plain, trained
from expert_models import Experts, Floats, json_with, one_process
from marks import longer

import zero
from zero.utils import safe_get_full_grad

CUT = {"stage3_param_persistence_threshold": 0}
STEPS = 50


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "ep", "stage"),
    [(2, 2, 3), *longer(*((w, ep, s) for w, ep in ((2, 2), (4, 4), (4, 2)) for s in range(4) if (w, s) != (2, 3)))],
)
def test_a_rank_whose_experts_get_no_token_for_50_steps(world: int, ep: int, stage: int) -> None:
    """The gradients of each are those of one process to the bit: weights are what they were, at a rate of zero."""
    make = functools.partial(Experts, only=(0,), blocks=1)
    json = json_with(ep, stage, zero_optimization=CUT, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    engine, *_ = zero.initialize(model=make(), config=json)
    for number in range(STEPS):
        engine.backward(engine(**integers(number, dist.get_rank())))
        wanted = plain(make, lambda _, place, number=number: integers(number, place), world)["grads"]
        for name, param in engine.module.named_parameters():
            assert torch.equal(safe_get_full_grad(param), wanted[name]), (number, name)
        engine.step()
    engine.destroy()


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "stage"), longer(*((w, s) for w in (2, 4) for s in range(4))))
def test_weights_after_50_steps_with_a_rank_that_gets_no_token(world: int, stage: int) -> None:
    make, lr = functools.partial(Floats, only=(0,)), 2**-4
    json = json_with(world, stage, optimizer={"type": "SGD", "params": {"lr": lr}})
    found = trained(make, json, integers, dist.get_rank(), STEPS)
    batches = [[integers(step, place) for place in range(world)] for step in range(STEPS)]
    wanted = one_process(make, batches, functools.partial(torch.optim.SGD, lr=lr)).model
    before = dict(make().named_parameters())
    for name, param in wanted.named_parameters():
        assert (found["weights"][name] - param.detach()).abs().max() <= 1e-6, name
        if "experts" in name:
            assert torch.equal(found["weights"][name][1:], before[name][1:])


def no_rows(number: int, place: int) -> dict[str, Any]:
    """The batch of the last places is empty."""
    batch = integers(number, place)
    return {name: value[:0] for name, value in batch.items()} if place in (1, 3) else batch


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "ep", "stage"), longer(*((w, ep, s) for w, ep in ((2, 2), (4, 2), (4, 4)) for s in range(4)))
)
def test_a_rank_with_a_batch_of_no_token(world: int, ep: int, stage: int) -> None:
    """Its experts still get those of others."""
    found, wanted = (
        trained(Experts, json_with(ep, stage, 2), no_rows, dist.get_rank()),
        plain(Experts, no_rows, world, 2),
    )
    for name, grad in wanted["grads"].items():
        assert torch.equal(found["grads"][name], grad), name
