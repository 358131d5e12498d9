"""The promise: what `zero plan` finds by search is true of its own numbers. What fits fits, the largest is the largest,
more ranks never take more, and 8 bits are counted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import config

from zero.config import load
from zero.config.override import apply
from zero.plan.memory import SLOTS, unit_bytes
from zero.plan.placement import Placement, Where
from zero.sizes.choice import CHOICES, StageChoice
from zero.sizes.cost import POLICIES, shape_cost
from zero.sizes.estimate import PlanRow
from zero.sizes.links import Links
from zero.sizes.rates import DEVICES
from zero.sizes.shape import Shape
from zero.tools.plan.search import Search, Setup, candidates

SHAPE = Shape(layers=6, width=512, inner=1024, vocabulary=4096)
FREE = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}
NATIVE = FREE | {"zero": {"reduce": "backend"}}
CHOSEN = st.sampled_from(
    [*CHOICES, StageChoice(3, shard_size=4), StageChoice(2, shard_size=4), StageChoice(3, secondary=4)]
)
POLICY = st.sampled_from(POLICIES)


@cache
def setup(ranks: int = 8, memory: float = 2e9, per_host: int = 4, accumulation: int = 1, **more: Any) -> Setup:
    values = FREE | {"gradient_accumulation_steps": accumulation} | more
    rates = replace(DEVICES["h100"], device_memory=memory, host_memory=4e9)
    return Setup(SHAPE, shape_cost(SHAPE, 1024), load(values, ranks), rates, per_host)


# What fits.


@settings(deadline=None, max_examples=60)
@given(choice=CHOSEN, policy=POLICY, memory=st.integers(1, 400), accumulation=st.sampled_from([1, 2, 5]))
def test_the_largest_micro_batch_fits_and_one_more_does_not(
    choice: StageChoice, policy: str, memory: int, accumulation: int
) -> None:
    search = Search(setup(memory=memory * 1e7, accumulation=accumulation), choice)
    most = search.largest(policy)
    assert search.row(policy, most + 1).lacks
    assert not most or not search.row(policy, most).lacks


@settings(deadline=None, max_examples=60)
@given(choice=CHOSEN, policy=POLICY, memory=st.integers(1, 400), more=st.integers(0, 100), size=st.integers(1, 64))
def test_what_fits_fits_in_more_memory_and_a_smaller_micro_batch_too(
    choice: StageChoice, policy: str, memory: int, more: int, size: int
) -> None:
    if not Search(setup(memory=memory * 1e7), choice).row(policy, size).lacks:
        search = Search(setup(memory=(memory + more) * 1e7), choice)
        assert not any(search.row(policy, smaller).lacks for smaller in (size, max(1, size // 2), 1))


@settings(deadline=None, max_examples=40)
@given(choice=st.sampled_from(CHOICES), policy=POLICY, power=st.integers(0, 6))
def test_more_ranks_never_take_more(choice: StageChoice, policy: str, power: int) -> None:
    """But for padding, which grows with the ranks by less than a thousandth. NCCL adds up: else more rows arrive."""
    made = (replace(setup(1 << bits), settings=load(NATIVE, 1 << bits)) for bits in (power + 1, power + 2))
    few, many = (Search(each, choice).row(policy, 2) for each in made)
    for kind, before, after in zip(few.device._fields, few.device, many.device, strict=True):
        assert after <= before * 1.001 + 4096, kind
    assert many.peak <= few.peak * 1.001 + 4096
    assert many.host.memory <= few.host.memory * 1.001 + 4096
    assert many.host.files <= few.host.files * 1.001 + 4096


def test_a_batch_that_is_given_stays() -> None:
    given = replace(setup(), settings=load(FREE | {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 4}, 8))
    rows = candidates(given)
    assert {row.micro_batch * row.accumulation * 8 for row in rows} == {96}
    assert {row.micro_batch for row in rows if row.choice.stage == 3} > {4, 12}
    free = candidates(setup(accumulation=3))
    assert {row.accumulation for row in free} == {3} and len({row.micro_batch for row in free}) > 4


@settings(deadline=None, max_examples=40)
@given(choice=CHOSEN, policy=POLICY, shared=st.sampled_from([2, 4]), size=st.integers(1, 64))
def test_ranks_that_share_a_sequence_have_a_part_of_its_activations(
    choice: StageChoice, policy: str, shared: int, size: int
) -> None:
    """State is cut over all of them, as if each had samples of its own; a batch has fewer samples."""
    alone, together = Search(setup(), choice), Search(setup(sequence_parallel_size=shared), choice)
    assert alone.room - together.room == 1e8, "another communicator"
    together.room = alone.room
    whole, part = alone.row(policy, size), together.row(policy, size * shared)
    assert (part.device, part.host, part.inputs_on_host) == (whole.device, whole.host, whole.inputs_on_host)
    assert (part.peak, part.step.step) == (pytest.approx(whole.peak), pytest.approx(whole.step.step))
    assert part.sets["train_batch_size"] == whole.sets["train_batch_size"]
    assert together.largest(policy) // shared == alone.largest(policy)
    assert load(apply(together.setup.settings.raw, part.sets), 8).summed == 8


# What travels.


def sent(choice: StageChoice, ranks: int, *, per_host: int = 64, **section: Any) -> Links:
    values = FREE | {"bf16": {"enabled": False}} | ({"zero_optimization": section} if section else {})
    made = Setup(SHAPE, shape_cost(SHAPE, 64), load(values, ranks), DEVICES["h100"], per_host)
    return Search(made, choice).row("none", 1).links


def test_8_bits_are_counted_with_their_scales() -> None:
    weights, gradients = {"stage": 3, "zero_quantized_weights": True}, {"stage": 3, "zero_quantized_gradients": True}
    whole, part = sent(StageChoice(3), 8).sent, 66 / 64 / 4
    reduced = sent(StageChoice(2), 8).sent / 2
    assert sent(StageChoice(3), 8, **weights).sent == pytest.approx(reduced + part * (whole - reduced), rel=0.01)
    assert sent(StageChoice(3), 8, **gradients).sent == pytest.approx(part * reduced + whole - reduced, rel=0.01)
    assert sent(StageChoice(3), 8, **{**weights, **gradients}).sent == pytest.approx(part * whole, rel=0.01)


def test_8_bits_between_hosts_go_to_each_rank() -> None:
    """And not around a ring, as what NCCL adds up."""
    ring = sent(StageChoice(2), 8, per_host=4)
    each = sent(StageChoice(2), 8, per_host=4, stage=2, zero_quantized_gradients=True)
    part = 66 / 64 / 4
    assert ring.inter_host / ring.sent == pytest.approx(1 / 4)
    assert each.inter_host == pytest.approx(ring.sent / 2 * (1 / 4 + part * 4 / 7), rel=0.01)


def test_state_that_streams_crosses_the_link_both_ways_and_its_gradient_does_not() -> None:
    def row(update: str) -> PlanRow:
        section = {"stage": 2, "offload_optimizer": {"device": "cpu", "zero": {"update": update}}}
        values = FREE | {"zero_optimization": section}
        return Search(replace(setup(), settings=load(values, 8)), StageChoice(2, "cpu")).row("none", 1)

    host, streamed = row("host"), row("gpu")
    at = Placement(Where.HOST, Where.DEVICE, streamed=True)
    records = [unit_bytes(unit, at, 0, 8, setup().formats).host.record for unit in setup().units]
    assert streamed.host.memory == sum(records) and streamed.links.host_link == 2 * sum(records)
    assert streamed.host.memory < host.host.memory and streamed.device.gradients > host.device.gradients == 0
    assert host.device.masters + host.device.moments == 0
    assert streamed.device.masters + streamed.device.moments == SLOTS * max(records)
    assert streamed.step.step < host.step.step and not host.step.busy["host"] == streamed.step.busy["host"] == 0
    one_way = sum(records) / setup().rates.host_link
    assert streamed.step.busy["down"] == pytest.approx(one_way) and streamed.step.busy["up"] > one_way
    assert streamed.step.step >= one_way


# What is set.


STREAMED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "zero": {"update": "gpu"}}}}


@pytest.mark.parametrize("start", [{}, {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, STREAMED])
def test_every_row_makes_a_configuration_that_is_one(start: dict[str, Any]) -> None:
    values = config(1, 8, accumulation=2, **start)
    made = Setup(SHAPE, shape_cost(SHAPE, 64), load(values, 8), DEVICES["h100"], 4)
    rows = candidates(made)
    assert len(rows) > 100
    for row in rows:
        found = load(apply(values, row.sets), 8)
        again = Search(replace(made, settings=found), row.choice).row(row.policy, row.micro_batch)
        assert (again.peak, again.step, again.links) == (row.peak, row.step, row.links)
        assert found.zero_optimization.stage == row.choice.stage
        assert found.shard_size == row.choice.shard_size
        assert found.train_micro_batch_size_per_gpu == row.micro_batch
        assert replace(made, settings=found).policy == row.policy
