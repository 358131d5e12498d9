"""Bytes per rank: the ZeRO paper's table, hand-made examples, and how the two relate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.plan.formats import Formats
from zero.plan.layout import make_layout
from zero.plan.memory import (
    StateBytes,
    alive_nbytes,
    formula_nbytes,
    in_flight_nbytes,
    replica_nbytes,
)
from zero.plan.sharding import Sharding
from zero.plan.units import ParamSpec, UnitPlan

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3, 7, 64, 127, 1024, 4096)


def unit(
    name: str, numel: int, world: int, dtype: str = "bf16", *, requires_grad: bool = True, group: int = 0
) -> UnitPlan:
    spec = ParamSpec(f"{name}.weight", numel, dtype, requires_grad, group)
    return UnitPlan(name, name, (spec,), make_layout({spec.name: numel}, world))


# Rajbhandari et al. 2020, figure 1 and table 1: model states of 7.5B parameters on 64 GPUs, mixed precision.
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_table_of_the_paper(stage: int, gigabytes: float, dtype: str) -> None:
    assert round(formula_nbytes(7_500_000_000, dtype, stage, 64).total / 1e9, 1) == gigabytes


@pytest.mark.parametrize(
    ("dtype", "formats", "optimizer"),
    [
        ("bf16", Formats("remainder"), 10),
        ("bf16", Formats("remainder", "bf16"), 6),
        ("bf16", Formats("remainder", "8bit"), 4 + 2 / 64),
        ("bf16", Formats("fp32", "8bit"), 6 + 2 / 64),
        ("fp32", Formats("fp32", "8bit"), 2 + 2 / 64),
        ("bf16", Formats("remainder", "8bit", states=1), 3 + 1 / 64),  # Lion
        ("fp32", Formats(states=0), 0),  # SGD
    ],
)
def test_bytes_a_parameter_by_format(dtype: str, formats: Formats, optimizer: float) -> None:
    numel = 256 * 1000
    assert replica_nbytes(numel, dtype, formats).optimizer == optimizer * numel
    assert formula_nbytes(numel, dtype, 1, 4, formats).optimizer == optimizer * numel / 4
    # Of which 512 are too few to be worth it.
    small = 512 * formats.states * (4 - formats.moments_nbytes(256) / (256 * max(1, formats.states)))
    assert replica_nbytes(numel, dtype, formats, numel - 512).optimizer == optimizer * numel + small


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**12), st.sampled_from(["bf16", "fp16", "fp32"]), st.integers(1, 4096))
def test_each_stage_cuts_one_term_more(numel: int, dtype: str, world: int) -> None:
    whole = replica_nbytes(numel, dtype)
    cut = StateBytes(*(term // world for term in whole))
    assert formula_nbytes(numel, dtype, 1, world) == (whole.parameters, whole.gradients, cut.optimizer)
    assert formula_nbytes(numel, dtype, 2, world) == (whole.parameters, cut.gradients, cut.optimizer)
    assert formula_nbytes(numel, dtype, 3, world) == cut


def test_shards_differ_where_only_large_parameters_have_moments_in_fewer_bits() -> None:
    specs = (ParamSpec("matrix", 4096, "bf16", True, 0, 2), ParamSpec("vector", 4096, "bf16", True, 0, 1))
    plan = UnitPlan("u", "", specs, make_layout({"matrix": 4096, "vector": 4096}, 2, 256))
    formats, sharding = Formats("remainder", "8bit"), Sharding.of_stage(1)
    held = [alive_nbytes((plan,), sharding, 2, rank=rank, formats=formats).optimizer for rank in (0, 1)]
    assert held == [2 * 4096 + 2 * (4096 + 4 * 16), 2 * 4096 + 2 * 4 * 4096]
    assert alive_nbytes((plan,), Sharding.of_stage(0), 1, formats=formats).optimizer == sum(held)


@pytest.mark.parametrize(("dtype", "size"), [("int8", 1), ("uint8", 1), ("fp64", 8)])
def test_a_frozen_unit_of_any_dtype_the_engine_takes_is_counted(dtype: str, size: int) -> None:
    frozen = unit("quantized", 128, 4, dtype, requires_grad=False, group=-1)
    assert alive_nbytes((frozen,), Sharding.of_stage(3), 4) == StateBytes(size * 32, 0, 0)
    assert alive_nbytes((frozen,), Sharding.of_stage(2), 4) == StateBytes(size * 128, 0, 0)


def test_gradients_on_their_way_by_hand() -> None:
    """Of the last units in the order of backward, two or three have messages on their way."""

    def most(some: tuple[UnitPlan, ...], parts: int, replicas: int, **how: object) -> float:
        return max((each.most for each in in_flight_nbytes(some, parts, replicas, **how)), default=0)

    units = (unit("a", 256, 4), unit("b", 128, 4), unit("frozen", 999, 4, requires_grad=False), unit("c", 64, 4))
    over_gloo, landing = 1 + 3 / 4, 2 * 256
    assert most(units, 4, 1) == 2 * (256 + 128) * over_gloo + landing
    assert most(units, 1, 4) == 2 * (256 + 128 + 64) * over_gloo + landing
    assert most(units, 4, 1, native=True) == 2 * (256 + 128) * (1 + 1 / 4) + landing
    # Where NCCL only moves them, the own slice comes, too.
    assert most(units, 4, 1, mirrored=True) == 2 * (256 + 128) * 2 + landing
    assert most(units, 4, 1, travel="fp32") == 4 * (256 + 128) * over_gloo + landing
    # What was collected is counted as gradients, and so is a buffer that takes the sum.
    assert most(units, 4, 1, collected=True) == 4 * (256 + 128) * 3 / 4 + landing
    whole = tuple(unit(name, 64, 4, "fp32") for name in "abc")
    assert [most(whole, 1, 4), most(whole, 1, 1), most((), 4, 1)] == [3 * 4 * 64 * 3 / 4 + 4 * 64, 4 * 64, 0]


def test_what_is_kept_for_8_bits_is_counted() -> None:
    """The own part of parameters, or the second copy's; and on each rank the error of the last gradient."""
    units = (unit("block", 256, 4),)
    both = {stage: alive_nbytes(units, Sharding.of_stage(stage), 4, coded=(stage == 3, True)) for stage in (2, 3)}
    assert both[3].parameters == 2 * 64 + 66 and both[2].parameters == 2 * 256
    assert both[2].gradients == both[3].gradients == 4 * 66
    twice = alive_nbytes(units, Sharding.of_stage(3), 4, coded=(True, False), secondary=2)
    assert twice == StateBytes(2 * 64 + 66 + 2 * 66, 0, twice.optimizer)
