"""The promise: sums and random numbers of the tree depend on positions, however ranks and micro-batches share them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from models import config
from torch import nn

import zero
from zero.config import ConfigError, load
from zero.core.tree import sum_tree

TREE = {"reduce": "tree"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_rows_are_added_in_pairs(count, dtype):
    rows = torch.randn(count, 37, generator=torch.Generator().manual_seed(count)).to(dtype)
    kept, out = rows.clone(), torch.empty(37)
    sum_tree(list(rows), out)
    level = list(rows.float())
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    assert torch.equal(out, level[0])
    assert torch.equal(rows, kept)


class Draw(nn.Module):
    """Shows what it draws; `fail` raises in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, fail: bool = False) -> torch.Tensor:
        drawn = torch.rand(4)
        if fail:
            raise RuntimeError("in the middle")
        return self.weight.sum() * 0 + drawn


def drawn() -> list[Any]:
    torch.manual_seed(4)
    engine, *_ = zero.initialize(model=Draw(), config=config(0, 1, accumulation=2, zero=TREE))
    found = []
    for _ in range(4):
        outputs = [engine() for _ in range(2)]
        found += [output.tolist() for output in outputs]
        engine.backward(outputs[-1].sum())
        engine.step()
    return found


def test_draws_differ_between_steps_micro_batches_and_forwards_and_repeat():
    found = drawn()
    assert len({tuple(values) for values in found}) == 8
    assert drawn() == found


def test_the_script_keeps_its_own_random_numbers():
    engine, *_ = zero.initialize(model=Draw(), config=config(0, 1, zero=TREE))
    torch.manual_seed(9)
    before = torch.get_rng_state()
    engine()
    with pytest.raises(RuntimeError, match="in the middle"):
        engine(fail=True)
    assert torch.equal(torch.get_rng_state(), before)
    engine.eval()
    assert torch.equal(engine(), torch.rand(4, generator=torch.Generator().manual_seed(9)) + 0 * engine.weight)


@pytest.mark.parametrize(
    ("world", "steps", "fix"), [(3, 4, "the number of ranks"), (2, 3, "gradient_accumulation_steps")]
)
def test_a_window_that_is_no_power_of_two_is_refused(world, steps, fix):
    json = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": steps, "zero": TREE}
    text = (
        f"zero.reduce: 'tree' wants powers of two; got world size {world} x gradient_accumulation_steps={steps} = "
        f"{world * steps} micro-batches per optimizer step; change {fix}, or use 'ranks'"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        load(json, world)
    assert load({**json, "zero": {}}, world).zero.reduce == "auto"
    assert load({**json, "gradient_accumulation_steps": 4}, 2).zero.reduce == "tree"
