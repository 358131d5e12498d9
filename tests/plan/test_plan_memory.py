"""Bytes per rank: the ZeRO paper's table, hand-made examples, and how the two relate."""

from __future__ import annotations

import pytest

from zero.plan.formats import Formats
from zero.plan.layout import make_layout
from zero.plan.memory import (
    Scheme,
    alive_nbytes,
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
    assert round(sum(held) / 1e9, 1) == gigabytes


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
    assert (twice.parameters, twice.gradients) == (2 * 64 + 66 + 2 * 66, 0)
