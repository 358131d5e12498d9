"""The promise: layers are divided so that the heaviest stage is as light as can be, and nothing is left out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero.parallel.pipeline.partition import divide
from zero.plan.pipeline import balanced


def heaviest(weights: Sequence[int], starts: Sequence[int]) -> int:
    ends = [*starts[1:], len(weights)]
    return max(sum(weights[start:end]) for start, end in zip(starts, ends, strict=True))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_division_is_lighter(weights: list[int], data: st.DataObject):
    parts = data.draw(st.integers(1, len(weights)))
    starts = balanced(weights, parts)
    assert starts[0] == 0 and len(starts) == parts and sorted(set(starts)) == starts
    others = itertools.combinations(range(1, len(weights)), parts - 1)
    assert heaviest(weights, starts) == min(heaviest(weights, (0, *each)) for each in others)


@pytest.mark.parametrize(
    ("weights", "parts", "starts"),
    [
        ([1] * 10, 4, [0, 3, 6, 8]),
        ([5], 1, [0]),
        ([0, 0, 0], 3, [0, 1, 2]),
        ([9, 1, 1, 1], 2, [0, 1]),
        ([1, 1, 1, 9], 2, [0, 3]),
    ],
)
def test_of_divisions_that_are_alike_the_first_parts_take_more(weights, parts, starts):
    assert balanced(weights, parts) == starts


def test_fewer_layers_than_stages():
    with pytest.raises(ValueError, match="2 layers are fewer than the 3 stages"):
        balanced([1, 1], 3)


class Net(nn.Module):
    """What is before the blocks, blocks that are not all alike, and what is behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(nn.Linear(1, 1).weight.detach())
        self.embedding = nn.Embedding(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4))
        self.head = nn.Linear(4, 3)


@pytest.mark.parametrize("partition", ["parameters", "uniform", "type:sequential", [1, 3], [3, 1]])
def test_every_parameter_is_of_one_stage_and_stages_follow_each_other(partition):
    model = Net()
    found = divide(model, 2, partition, {})
    named = [name for name, _ in model.named_parameters()]
    stages = [[at for of, at in found.items() if f"{name}.".startswith(f"{of}.")] for name in named]
    assert all(len(each) == 1 for each in stages)
    assert [at for (at,) in stages] == sorted(at for (at,) in stages)
    assert found["shift"] == found["embedding"] == 0 and found["head"] == 1
    if isinstance(partition, list):
        assert [found[f"blocks.{at}"] for at in range(4)] == [0] * partition[0] + [1] * partition[1]


@pytest.mark.parametrize(("said", "found"), [("blocks.2", [0, 0, 1, 1]), ("blocks.0", [1, 1, 1, 1])])
def test_what_is_not_named_is_of_the_stage_of_what_is_before_it(said, found):
    stage_of = divide(Net(), 2, "parameters", {said: 1})
    assert [stage_of[f"blocks.{at}"] for at in range(4)] == found
    assert stage_of["embedding"] == 0 and stage_of["head"] == 1
