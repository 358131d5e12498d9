"""The promise: experts that are trained in part, that nobody calls, or that two modules share are right."""

from __future__ import annotations

import functools

import pytest
import torch
from cut_models import integers, place_of, plain, trained
from expert_models import Experts, json_with
from marks import longer
from torch import nn


class Skipping(Experts):
    """Its last block has experts that no forward calls."""

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(ids))
        return (self.head(self.blocks[1].mlp(x)) * weights).sum() / 1024


def half_frozen(name: str) -> nn.Module:
    model = Experts()
    for block in model.blocks:
        getattr(block.mix.experts, name).requires_grad_(False)
    return model


def shared() -> nn.Module:
    """Two modules have the same stacks, as encoder and decoder may."""
    model = Experts()
    for name in ("up", "down"):
        setattr(model.blocks[1].mix.experts, name, getattr(model.blocks[0].mix.experts, name))
    return model


KINDS = {
    "up is frozen": functools.partial(half_frozen, "up"),
    "down is frozen": functools.partial(half_frozen, "down"),
    "no call": Skipping,
    "shared": shared,
}
SHORT = [("up is frozen", 2, 3), ("no call", 2, 1), ("shared", 2, 3)]
REST = [(kind, world, stage) for kind in KINDS for world in (2, 4) for stage in range(4)]


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "world", "stage"), [*SHORT, *longer(*(each for each in REST if each not in SHORT))])
def test_a_step_is_that_of_one_process(kind: str, world: int, stage: int) -> None:
    make = KINDS[kind]
    found = trained(make, json_with(2, stage, 2), integers, place_of(1))
    wanted, before = plain(make, integers, world, 2), dict(make().named_parameters())
    for name, grad in wanted["grads"].items():
        if before[name].requires_grad:
            grad = torch.zeros_like(before[name]) if grad is None else grad
            assert torch.equal(found["weights"][name], before[name] - 0.125 * grad), name
        assert ("experts" not in name) or found["shapes"][name] == (2, *before[name].shape[1:])
    assert set(found["weights"]) == {name for name, param in before.items() if param.requires_grad}
