"""Where the state of each unit rests: whole units, the first ones on the device, no more than was allowed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zero.plan.layout import make_layout
from zero.plan.placement import Placement, Where, place
from zero.plan.units import ParamSpec, UnitPlan

DEVICE, HOST, FILE = Where.DEVICE, Where.HOST, Where.FILE
PARTS = 2


def unit(index: int, numel: int, *, requires_grad: bool = True, group: int = 0) -> UnitPlan:
    spec = ParamSpec(f"{index}.weight", numel, "bf16", requires_grad, group)
    return UnitPlan(str(index), "", (spec,), make_layout({spec.name: numel}, PARTS))


def units_of(*numels: int) -> list[UnitPlan]:
    return [unit(index, numel) for index, numel in enumerate(numels)]


several = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([(True, 0), (True, 1), (True, -1), (False, -1), (False, 0)])),
    max_size=12,
).map(lambda rows: [unit(i, numel, requires_grad=on, group=group) for i, (numel, (on, group)) in enumerate(rows)])


def test_by_hand() -> None:
    units = units_of(320, 320, 320, 320)
    assert place(units, PARTS, HOST, DEVICE) == [Placement(HOST, DEVICE)] * 4
    assert place(units, PARTS, HOST, FILE, ratio=0.5, max_in_cpu=160) == [
        Placement(DEVICE, HOST),  # 160 elements of its shard
        Placement(DEVICE, FILE),
        Placement(HOST, FILE),
        Placement(HOST, FILE),
    ]
    # A quarter and a bit on the device: one unit fits, two do not.
    assert [each.optimizer for each in place(units, PARTS, FILE, DEVICE, ratio=0.7)] == [DEVICE, FILE, FILE, FILE]
    # The first one is too large for a half; the others go on the device in its place as long as there is room.
    wide = units_of(3200, 320, 320, 320)
    assert [each.optimizer for each in place(wide, PARTS, HOST, DEVICE, ratio=0.8)] == [HOST, DEVICE, DEVICE, HOST]
    assert place([], PARTS, HOST, HOST) == []


def test_what_is_not_trained_has_no_state_to_move() -> None:
    units = [unit(0, 64, requires_grad=False, group=-1), unit(1, 64, group=-1), unit(2, 64, requires_grad=False)]
    assert place(units, PARTS, HOST, HOST) == [Placement(DEVICE, HOST)] * 3


@settings(deadline=None, max_examples=200)
@given(several, st.floats(0, 1), st.sampled_from([HOST, FILE]))
def test_ratio_keeps_as_many_whole_units_as_fit(units: list[UnitPlan], ratio: float, where: Where) -> None:
    found = [each.optimizer for each in place(units, PARTS, where, DEVICE, ratio)]
    trained = [each.requires_grad and each.group >= 0 for each in units]
    assert {each for each, on in zip(found, trained, strict=True) if not on} <= {DEVICE}
    sizes = [(each.layout.numel, found[index]) for index, each in enumerate(units) if trained[index]]
    total = sum(numel for numel, _ in sizes)
    kept = sum(numel for numel, rests in sizes if rests is DEVICE)
    assert kept <= (1 - ratio) * total
    taken = 0
    for numel, rests in sizes:
        taken += numel if rests is DEVICE else 0
        # Whatever went away did not fit beside what came before it; one element of tolerance for the rounding.
        assert rests is DEVICE or taken + numel > (1 - ratio) * total - 1


@settings(deadline=None, max_examples=200)
@given(several, st.integers(0, 20_000))
def test_max_in_cpu_lifts_shards_out_of_files(units: list[UnitPlan], most: int) -> None:
    found = [each.params for each in place(units, PARTS, DEVICE, FILE, max_in_cpu=most)]
    assert set(found) <= {HOST, FILE}
    shards = [each.layout.numel // PARTS for each in units]
    assert sum(numel for numel, rests in zip(shards, found, strict=True) if rests is HOST) <= most
    taken = 0
    for numel, rests in zip(shards, found, strict=True):
        taken += numel if rests is HOST else 0
        assert rests is HOST or taken + numel > most
    for other in (DEVICE, HOST):  # nothing comes out of files that is in none
        assert {each.params for each in place(units, PARTS, DEVICE, other, max_in_cpu=most)} <= {other}
