"""Bytes per rank: the ZeRO paper's table, hand-made examples, and how the two relate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero.plan.formats import Formats
from zero.plan.layout import make_layout
from zero.plan.memory import (
    LINE,
    PAGE,
    KindBytes,
    Scheme,
    StateBytes,
    alive_nbytes,
    host_bytes,
    in_flight_nbytes,
    unit_bytes,
)
from zero.plan.placement import Placement, Where
from zero.plan.sharding import Sharding
from zero.plan.units import ParamSpec, UnitPlan

ON_DEVICE = Placement(Where.DEVICE, Where.DEVICE)


def unit(
    name: str, numel: int, world: int, dtype: str = "bf16", *, requires_grad: bool = True, group: int = 0
) -> UnitPlan:
    spec = ParamSpec(f"{name}.weight", numel, dtype, requires_grad, group)
    return UnitPlan(name, name, (spec,), make_layout({spec.name: numel}, world))


# Rajbhandari et al. 2020, figure 1 and table 1: model states of 7.5B parameters on 64 GPUs, mixed precision.
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_table_of_the_paper(stage: int, gigabytes: float, dtype: str) -> None:
    sharding = Sharding.of_stage(stage)
    some, parts = (unit("all", 7_500_000_000, 64, dtype),), 64 if sharding.optim else 1
    gradients = {"reduced_gradients" if sharding.grads else "local_gradients": ["all"]}
    held = alive_nbytes(some, Scheme(sharding, parts, accumulate=dtype), **gradients)
    assert round(held.state.total / 1e9, 1) == gigabytes


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
    spec = ParamSpec("matrix", numel, dtype, True, 0, 2)
    plan = UnitPlan("u", "", (spec,), make_layout({"matrix": numel}, 4, 256))
    for parts in (1, 4):
        found = unit_bytes(plan, ON_DEVICE, 0, parts, formats).device
        assert found.record == optimizer * numel / parts and found.gradients == 4 * numel / parts


@given(
    st.integers(1, 10**6),
    st.sampled_from(["bf16", "fp16", "fp32"]),
    st.sampled_from([1, 2, 7]),
    st.builds(Placement, st.sampled_from(Where), st.sampled_from(Where), st.booleans()),
)
def test_each_kind_is_in_one_place_and_off_the_device_in_whole_pages(
    numel: int, dtype: str, parts: int, at: Placement
) -> None:
    at = at._replace(streamed=at.streamed and at.optimizer is not Where.DEVICE)
    plan, formats = unit("u", numel, parts, dtype), Formats("remainder")
    found = unit_bytes(plan, at, 0, parts, formats, ("fp32", dtype))
    shard, size = plan.layout.numel // parts, 4 if dtype == "fp32" else 2
    places = {"parameters": at.params, "masters": at.optimizer, "moments": at.optimizer}
    places["gradients"] = Where.DEVICE if at.used_on_device else Where.HOST
    for where, kinds in zip(Where, found, strict=True):
        for kind, nbytes in kinds._asdict().items():
            assert nbytes == 0 or places[kind] is where
    for kinds in (found.host, found.file):
        assert kinds.parameters % PAGE == kinds.gradients % PAGE == kinds.record % PAGE == 0
    assert found.all.moments >= 8 * shard and found.all.moments - 8 * shard < PAGE + 3 * LINE
    assert 0 <= found.all.parameters - size * shard < PAGE
    frozen = replace(plan, params=tuple(spec._replace(requires_grad=False) for spec in plan.params))
    assert unit_bytes(frozen, at, 0, parts, formats).all == KindBytes(found.all.parameters)


def test_what_is_off_the_device_adds_up() -> None:
    plans = [unit(name, numel, 2) for name, numel in (("a", 5000), ("b", 100), ("c", 70_000))]
    places = [Placement(Where.HOST, Where.DEVICE), Placement(Where.FILE, Where.FILE), Placement(Where.FILE, Where.HOST)]
    held = [unit_bytes(plan, at, 0, 2, Formats()) for plan, at in zip(plans, places, strict=True)]
    found, (_, small, large) = host_bytes(held, 3, 2), held
    assert found.files == small.file.parameters + small.file.record + large.file.record
    assert found.buffers == 3 * large.file.record + 2 * small.file.parameters
    assert found.parameters == large.host.parameters and found.masters + found.moments == held[0].host.record
    assert found.gradients == sum(each.host.gradients for each in held)
    assert found.memory == sum(found) - found.files


def test_shards_differ_where_only_large_parameters_have_moments_in_fewer_bits() -> None:
    specs = (ParamSpec("matrix", 4096, "bf16", True, 0, 2), ParamSpec("vector", 4096, "bf16", True, 0, 1))
    plan = UnitPlan("u", "", specs, make_layout({"matrix": 4096, "vector": 4096}, 2, 256))
    formats, sharding = Formats("remainder", "8bit"), Sharding.of_stage(1)
    held = [alive_nbytes((plan,), Scheme(sharding, 2, formats=formats), rank).record for rank in (0, 1)]
    assert held == [2 * 4096 + 2 * (4096 + 4 * 16), 2 * 4096 + 2 * 4 * 4096]
    assert alive_nbytes((plan,), Scheme(Sharding.of_stage(0), formats=formats)).record == sum(held)


@pytest.mark.parametrize(("dtype", "size"), [("int8", 1), ("uint8", 1), ("fp64", 8)])
def test_a_frozen_unit_of_any_dtype_the_engine_takes_is_counted(dtype: str, size: int) -> None:
    frozen = unit("quantized", 128, 4, dtype, requires_grad=False, group=-1)
    assert alive_nbytes((frozen,), Scheme(Sharding.of_stage(3), 4)) == KindBytes(size * 32)
    assert alive_nbytes((frozen,), Scheme(Sharding.of_stage(2), 4)) == KindBytes(size * 128)


def test_gradients_on_their_way_by_hand() -> None:
    """Of the last units in the order of backward, two or three have messages on their way."""

    def most(some: tuple[UnitPlan, ...], parts: int, replicas: int, **how: object) -> float:
        scheme = Scheme(Sharding.of_stage(1), parts, replicas, **{"mirrored": False} | how)
        return max((each.most for each in in_flight_nbytes(some, scheme)), default=0)

    units = (unit("a", 256, 4), unit("b", 128, 4), unit("frozen", 999, 4, requires_grad=False), unit("c", 64, 4))
    over_gloo, landing = 1 + 3 / 4, 2 * 256
    assert most(units, 4, 1) == 2 * (256 + 128) * over_gloo + landing
    assert most(units, 1, 4) == 2 * (256 + 128 + 64) * over_gloo + landing
    assert most(units, 4, 1, native=True) == 2 * (256 + 128) * (1 + 1 / 4) + landing
    # Where NCCL only moves them, the own slice comes, too.
    assert most(units, 4, 1, mirrored=True) == 2 * (256 + 128) * 2 + landing
    assert most(units, 4, 1, travel="fp32") == 4 * (256 + 128) * over_gloo + landing
    # What was collected is counted as gradients, and so is a buffer that takes the sum.
    assert most(units, 4, 1, accumulation=2) == 4 * (256 + 128) * 3 / 4 + landing
    whole = tuple(unit(name, 64, 4, "fp32") for name in "abc")
    assert [most(whole, 1, 4), most(whole, 1, 1), most((), 4, 1)] == [3 * 4 * 64 * 3 / 4 + 4 * 64, 4 * 64, 0]


def test_what_is_kept_for_8_bits_is_counted() -> None:
    """The own part of parameters, or the second copy's; and on each rank the error of the last gradient."""
    units = (unit("block", 256, 4),)
    schemes = {stage: Scheme(Sharding.of_stage(stage), 4, coded=(stage == 3, True)) for stage in (2, 3)}
    both = {stage: alive_nbytes(units, scheme) for stage, scheme in schemes.items()}
    assert both[3].parameters == 2 * 64 + 66 and both[2].parameters == 2 * 256
    assert both[2].gradients == both[3].gradients == 4 * 66
    twice = alive_nbytes(units, Scheme(Sharding.of_stage(3), 4, coded=(True, False), secondary=2))
    assert twice.state == StateBytes(2 * 64 + 66 + 2 * 66, 0, twice.record)
