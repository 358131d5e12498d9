"""The promise: the knobs of stage 3 change when parameters come and how long they stay, and no number."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from models import Net, config, make_net
from stages import one_backward, run, same
from test_lifetime import LATER_BACKWARD, LATER_FORWARD, Recorder, step
from torch import nn

import zero
from zero.plan.memory import alive_nbytes
from zero.plan.order import Limits
from zero.plan.sharding import Sharding

BLOCK, ROOT = 661, 449  # elements of the units of make_net(blocks=2)
P = "stage3_prefetch_bucket_size"
LIVE = "stage3_max_live_parameters"
REUSE = "stage3_max_reuse_distance"
WHOLE = "stage3_param_persistence_threshold"
IN_ALL = "stage3_model_persistence_threshold"


def verbs(section: dict[str, int]) -> tuple[list[str], bool]:
    """Verbs of the third step, and whether the bytes of parameters at rest are those that planning tells."""
    settings = config(3, 2)
    settings["zero_optimization"].update(section)
    with pytest.MonkeyPatch.context() as patch:
        engine, *_ = zero.initialize(model=make_net(blocks=2), config=settings)
        recorder = Recorder(patch)
        for index in range(3):
            recorder.take()
            step(engine, index)
    plans = [unit.plan for unit in engine._sharded.units]
    limits = Limits(whole=section.get(WHOLE, 0), whole_in_all=section.get(IN_ALL, sys.maxsize))
    planned = alive_nbytes(plans, Sharding.of_stage(3), 2, limits=limits).parameters
    found = recorder.take()[0], engine.state_nbytes().parameters == planned
    assert [sum(spec.numel for spec in unit.plan.params) for unit in engine._sharded.units] == [ROOT, BLOCK, BLOCK]
    engine.destroy()
    return found


def test_without_a_bucket_nothing_is_fetched_ahead(pool):
    for found, _ in pool.run(2, verbs, {P: 0}):
        for index, verb in enumerate(found):
            if verb.startswith("gather"):
                assert found[index + 1] == verb.replace("gather", "wait")


def test_a_bucket_holds_one_unit_at_least(pool):
    for section in ({P: 1}, {P: 2 * BLOCK - 1}):
        for found, _ in pool.run(2, verbs, section):
            assert found == [*LATER_FORWARD, *LATER_BACKWARD]


def test_as_many_units_as_fit_are_fetched_ahead(pool):
    for section in ({P: 2 * BLOCK}, {}):
        for found, _ in pool.run(2, verbs, section):
            assert found[:4] == ["gather <root>", "wait <root>", "gather blocks.0", "gather blocks.1"]


def test_nothing_is_fetched_ahead_beyond_the_limit_of_what_is_live(pool):
    for found, _ in pool.run(2, verbs, {LIVE: ROOT + 2 * BLOCK - 1}):
        assert found[:4] == ["gather <root>", "wait <root>", "gather blocks.0", "wait blocks.0"]
    assert pool.run(2, verbs, {LIVE: ROOT + BLOCK - 1}) == pool.run(2, verbs, {P: 0})


def test_a_unit_that_is_used_again_soon_stays(pool):
    for found, _ in pool.run(2, verbs, {REUSE: 10**9}):
        for unit in ("<root>", "blocks.0", "blocks.1"):
            assert [verb for verb in found if verb.endswith(unit)] == [
                *(f"gather {unit}", f"wait {unit}", f"release {unit}", f"reduce {unit}")
            ]
    # Between its uses lie the root, whose own unit is used once more, and for the first block the second one twice.
    for found, _ in pool.run(2, verbs, {REUSE: ROOT}):
        assert [found.count(f"gather {unit}") for unit in ("<root>", "blocks.0", "blocks.1")] == [1, 2, 1]


@pytest.mark.parametrize(
    ("section", "whole"),
    [
        ({WHOLE: ROOT - 1}, []),
        ({WHOLE: ROOT}, ["<root>"]),
        ({WHOLE: BLOCK}, ["<root>", "blocks.0", "blocks.1"]),
        ({WHOLE: BLOCK, IN_ALL: 2 * BLOCK}, ["<root>", "blocks.0"]),
        ({WHOLE: BLOCK, IN_ALL: BLOCK - 1}, ["<root>"]),
        ({WHOLE: BLOCK, IN_ALL: 0}, []),
    ],
)
def test_small_units_stay_whole_and_are_gathered_once_a_step(pool, section, whole):
    for found, as_planned in pool.run(2, verbs, section):
        for unit in ("<root>", "blocks.0", "blocks.1"):
            own = [verb for verb in found if verb.endswith(unit)]
            if unit in whole:
                assert own == [f"reduce {unit}", f"release {unit}", f"gather {unit}", f"wait {unit}"]
            else:
                assert own.count(f"gather {unit}") == (1 if unit == "<root>" else 2)
        assert as_planned


class Scalar(Net):
    """A Net whose tokens come from numbers, as the other tests give them."""

    def __init__(self) -> None:
        super().__init__(blocks=2)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        tokens = (x.abs() * 4).long().clamp(max=16)
        return super().forward(tokens, (tokens * 3 + 1) % 17)


KNOBS: list[dict[str, int]] = [
    {P: 0},
    {P: 1},
    {P: 700},
    {LIVE: 0},
    {LIVE: 1200},
    {REUSE: 500},
    {REUSE: 10**9},
    {WHOLE: 450},
    {WHOLE: 10**9},
    {WHOLE: 661, IN_ALL: 700, REUSE: 2000, P: 3},
]


def all_knobs(kind: type[nn.Module]) -> list[dict[str, Any]]:
    return [run(kind, one_backward, 3, section) for section in [{}, *KNOBS]]


def test_no_knob_changes_a_number(pool):
    for standard, *others in pool.run(2, all_knobs, Scalar):
        for section, found in zip(KNOBS, others, strict=True):
            assert same(standard, found), section


@pytest.mark.ranks(2)
def test_what_stays_whole_can_be_read_between_steps():
    settings = config(3, 2)
    settings["zero_optimization"][WHOLE] = ROOT
    engine, *_ = zero.initialize(model=make_net(blocks=2), config=settings)
    step(engine, 0)
    with zero.GatheredParameters(engine.module.head.weight):
        equal = torch.equal(engine.module.head.weight, engine.module.head.weight.clone())
    found = equal and engine.module.head.weight.isfinite().all().item()
    engine.destroy()
    assert found
