"""The promise: what recomputation keeps is what its policy says, to the byte; `auto` stays in its budget."""

from __future__ import annotations

import gc
import logging
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from models import share
from ranks import listening
from recomputing import HEADS, WIDTH, make, settings, steps

import zero
from zero.recompute.policy import Cost, Policy, choose, peak

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from live import LiveBytes

BLOCKS = 4
TOKENS = 2 * 5  # of a micro-batch
INPUT = TOKENS * WIDTH * 4  # bytes of the input of a block
STATISTICS = 2 * TOKENS * HEADS * 4  # what attention gives besides its result is not more
# Every product of a block but the last, and attention: qkv, out, up, and the heads together.
PRODUCTS = TOKENS * (3 * WIDTH + WIDTH + 4 * WIDTH + WIDTH) * 4


def alive_of(engine: Any) -> LiveBytes:
    """Counts the storages of all that operations give, but those of parameters."""
    return LiveBytes(unit.buffer.full for unit in engine._sharded.units)


def made(section: dict[str, Any], rest: dict[str, Any], stage: int = 0) -> Any:
    values = settings(stage, section, activation_checkpointing=rest)
    return zero.initialize(model=make(blocks=BLOCKS, dropout=0.0), config=values)[0]


def kept(section: dict[str, Any], rest: dict[str, Any]) -> int:
    """Bytes that one block more keeps between the forward and the backward of the second step."""
    engine = made(section, rest)
    steps(engine, 1)
    found = []
    for count in (1, BLOCKS):
        x = engine.module.embed(share(0)[0])
        with alive_of(engine) as live, engine._training.recomputing.scope():
            y = x
            for block in engine.module.blocks[:count]:
                y = block(y, (engine.module.turn[0], engine.module.turn[1]), scale=engine.module.turn[0, 0])
            gc.collect()
            found.append(live.now)
        y.sum().backward()
    engine.zero_grad()
    engine.destroy()
    assert (found[1] - found[0]) % (BLOCKS - 1) == 0
    return (found[1] - found[0]) // (BLOCKS - 1)


@pytest.mark.ranks(1)
def test_a_block_keeps_what_its_policy_says():
    selective = {"modules": ["Block"], "policy": "selective"}
    host = {"cpu_checkpointing": True}
    block = {"contiguous_memory_optimization": True, "number_checkpoints": BLOCKS}
    everything = kept({}, {})
    assert kept({"modules": ["Block"]}, {}) == INPUT
    assert INPUT + PRODUCTS <= kept(selective, {}) <= min(INPUT + PRODUCTS + STATISTICS, 0.7 * everything)
    assert kept({**selective, "products": 2}, {}) <= 0.5 * everything
    assert kept({"modules": ["Block"]}, host) == 0  # the buffers on the host were there before
    assert kept({"modules": ["Block"]}, block) == 0  # the block is one storage, which was there before


def under_budget(stage: int, budget: int) -> tuple[list[str], int, list[str]]:
    """The policies that are chosen under a budget, the peak of what blocks keep in a later step, and what is logged."""
    with listening(logging.INFO) as lines:
        engine = made({"modules": ["Block"], "policy": "auto", "budget": budget}, {}, stage)
        steps(engine, 1)
    policies = [module.policy.value for module in engine._training.recomputing.modules]
    steps(engine, 1)
    x = engine.module.embed(share(0)[0])
    with alive_of(engine) as live:
        y = engine.module.body(x)
        gc.collect()
        nbytes = live.now
    y.sum().backward()
    engine.destroy()
    return policies, nbytes, [line for line in lines if line.startswith("zero.recompute: of")]


def all_budgets(stage: int) -> list[Any]:
    return [under_budget(stage, budget) for budget in (1, 25_000, 40_000, 10**7)]


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_auto_recomputes_as_little_as_fits(pool, stage):
    ranks = pool.run(2, all_budgets, stage)
    assert [[each[0] for each in rank] for rank in ranks] == [[each[0] for each in ranks[0]]] * 2
    (least, first, said), (_, second, _), (_, third, _), (most, fourth, last) = ranks[0]
    assert least == ["full"] * BLOCKS
    assert most == ["none"] * BLOCKS
    mixed = ranks[0][2][0]
    assert len(set(mixed)) > 1 and sorted(mixed, key=["full", "selective", "none"].index) == mixed
    assert first < second < third < fourth
    assert second <= 25_000 and third <= 40_000
    assert "which is more than the budget" in said[0] and "4 in full" in said[0]
    assert "4 keep all" in last[0]
    assert not ranks[1][0][2], "rank 0 speaks for all"


class Other(torch.nn.Module):
    """Runs its block on rank 0 only, and twice there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = make(blocks=2).blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = torch.ones(2, WIDTH // HEADS)
        for _ in range(2 if dist.get_rank() == 0 else 0):
            x = self.blocks[0](x, (turn[0], turn[1]), scale=turn[0, 0])
        return x.square().mean() + sum(param.sum() for param in self.parameters()) * 0.0


@pytest.mark.ranks(2)
def test_ranks_that_call_other_modules_choose_alike():
    values = settings(1, {"modules": ["Block"], "policy": "auto", "budget": "1 GiB"})
    engine = zero.initialize(model=Other(), config=values)[0]
    engine.backward(engine(torch.ones(2, 5, WIDTH)))
    engine.step()
    assert [module.policy for module in engine._training.recomputing.modules] == [Policy.NONE, Policy.FULL]
    engine.destroy()


# The choice, by itself.

costs = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)).map(
    lambda parts: Cost(sum(parts), parts[0] + parts[1], parts[0])
)
cases = st.lists(costs, min_size=1, max_size=4).flatmap(
    lambda found: st.tuples(st.just(dict(enumerate(found))), st.lists(st.integers(0, len(found) - 1), max_size=6))
)


def peak_by_hand(calls: list[int], found: dict[int, Cost], policies: dict[int, Policy]) -> int:
    """Play a forward and a backward, one call after the other."""
    kept = [found[module].of(policies[module]) for module in calls]
    highest = sum(kept)
    for place in reversed(range(len(calls))):
        running = max(kept[place], found[calls[place]].none)  # what its backward works on
        highest = max(highest, sum(kept[:place]) + running)
    return highest


@examples(max_examples=200)
@given(cases, st.integers(0, 60))
def test_a_choice_fits_where_one_does_and_cannot_be_improved(case: tuple, budget: int) -> None:
    found, calls = case
    choice = choose(calls, found, budget)
    assert set(choice.policies) == set(calls)
    assert choice.nbytes == peak_by_hand(calls, found, choice.policies) == peak(calls, found, choice.policies)
    called = sorted(set(calls))
    every = [dict(zip(called, each, strict=True)) for each in product(Policy, repeat=len(called))]
    if any(peak(calls, found, each) <= budget for each in every):
        assert choice.nbytes <= budget
        for module in called:  # no single module could be recomputed less
            for better in list(Policy)[: list(Policy).index(choice.policies[module])]:
                assert peak(calls, found, {**choice.policies, module: better}) > budget
    else:
        assert set(choice.policies.values()) <= {Policy.FULL}
