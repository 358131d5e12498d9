"""The promise: dropout inside of experts trains, and drops the same when a block is computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cut_models import integers, place_of, trained
from expert_models import Experts, Stacks, json_with
from marks import longer
from torch import nn

import zero


class Dropping(Stacks):
    """What its experts give is dropped or doubled."""

    def __init__(self) -> None:
        super().__init__(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x, index, weights))


def dropping(p: float = 0.5) -> nn.Module:
    model = Experts()
    for block in model.blocks:
        with_drop = Dropping()
        with_drop.load_state_dict(block.mix.experts.state_dict())
        block.mix.experts, with_drop.drop.p = with_drop, p
    return model


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "stage"), [(2, 3), *longer((2, 1), (4, 3))])
def test_what_is_dropped_is_dropped_again(world: int, stage: int) -> None:
    def found(**more: Any) -> dict[str, Any]:
        torch.manual_seed(4)
        return trained(dropping, json_with(2, stage, **more), integers, place_of(1))

    wanted, again = found(), found(zero={"recompute": {"modules": ["Block"], "policy": "full"}})
    assert wanted["losses"] == again["losses"]
    for name, grad in wanted["grads"].items():
        assert torch.equal(again["grads"][name], grad), name
    plain = trained(lambda: dropping(0.0), json_with(2, stage), integers, place_of(1))
    assert plain["losses"] != wanted["losses"]


@pytest.mark.ranks(2)
def test_in_eval_nothing_is_dropped() -> None:
    model = dropping().eval()
    batch = integers(0, place_of(1))
    wanted = model(**batch).item()
    engine, *_ = zero.initialize(model=model, config=json_with(2, 3))
    with torch.no_grad():
        assert engine.eval()(**batch).item() == wanted
    engine.destroy()
