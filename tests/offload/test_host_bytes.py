"""Bytes off the device, computed before anything is allocated: records hold what a step needs, and tables add up."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from zero.kernels.moments import Moment
from zero.memory.host_bytes import (
    LINE,
    MIB,
    PAGE,
    HostBytes,
    host_bytes,
    host_table,
    record_nbytes,
    shard_nbytes,
)
from zero.plan.formats import ITEMSIZE, Formats, runs
from zero.plan.layout import make_layout, round_up
from zero.plan.placement import Placement, Where, keeps_copy, place
from zero.plan.units import ParamSpec, UnitPlan

DEVICE, HOST, FILE = Where.DEVICE, Where.HOST, Where.FILE
FORMATS = [
    Formats(master, moments, states)
    for master in ("fp32", "remainder")
    for moments in ("fp32", "bf16", "8bit")
    for states in (0, 1, 2)
]


def unit(
    shapes: list[tuple[int, int]], parts: int, formats: Formats, dtype: str = "bf16", *, trained: bool = True
) -> UnitPlan:
    """A unit of parameters given as (numel, ndim)."""
    group = 0 if trained else -1
    specs = tuple(ParamSpec(f"p{i}", numel, dtype, trained, group, ndim) for i, (numel, ndim) in enumerate(shapes))
    layout = make_layout({spec.name: spec.numel for spec in specs}, parts, formats.alignment)
    return UnitPlan("unit", "", specs, layout)


shapes = st.lists(
    st.tuples(st.sampled_from([0, 1, 257, 4096, 5000, 20_000]), st.integers(1, 2)), min_size=1, max_size=6
)
formats_of = st.sampled_from(FORMATS)
dtypes = st.sampled_from(["fp32", "bf16", "fp16"])
placements = st.builds(Placement, st.sampled_from(list(Where)), st.sampled_from(list(Where)))


@settings(deadline=None, max_examples=200)
@given(shapes, formats_of, dtypes, st.booleans(), st.integers(1, 4), st.data())
def test_a_record_has_room_for_what_a_step_needs(
    shapes: list[tuple[int, int]], formats: Formats, dtype: str, mirrored: bool, parts: int, data: st.DataObject
) -> None:
    plan = unit(shapes, parts, formats, dtype)
    rank = data.draw(st.integers(0, parts - 1))
    window = plan.layout.shard(rank, parts)
    masters = [ITEMSIZE[dtype] * window.numel if mirrored else 0, formats.master_nbytes(window.numel, dtype)]
    moments = []
    for run in runs(plan, window, formats.moments):
        moment = Moment.filled(run.numel, run.format, 0.0, "cpu", True)  # what the kernels take
        scales = 0 if moment.scales is None else moment.scales.nbytes
        moments += formats.states * [moment.values.nbytes, scales]
    # A store places tensor behind tensor, each on a cache line.
    first, both = (sum(round_up(nbytes, LINE) for nbytes in sizes) for sizes in (masters, masters + moments))
    made = record_nbytes(plan, rank, parts, formats, mirrored)
    assert sum(made) == round_up(both, PAGE)
    assert made[0] == (first if moments else sum(made))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(shapes, dtypes, st.booleans(), placements), max_size=5), formats_of, st.booleans())
def test_the_bytes_add_up(
    rows: list[tuple[list[tuple[int, int]], str, bool, Placement]], formats: Formats, mirrored: bool
) -> None:
    parts, rank = 2, 1
    units = [unit(shapes, parts, formats, dtype, trained=trained) for shapes, dtype, trained, _ in rows]
    placed = [placement if trained else placement._replace(optimizer=DEVICE) for _, _, trained, placement in rows]
    held = host_bytes(units, placed, rank, parts, formats, "fp32", mirrored, 3, 5)
    # Every piece by itself, as an arena and the files would be carved.
    in_memory, files, slots, param_slots = 0, 0, [0], [0]
    for plan, placement in zip(units, placed, strict=True):
        kept = sum(record_nbytes(plan, rank, parts, formats, keeps_copy(placement, mirrored)))
        shard = shard_nbytes(plan, parts, plan.dtype)
        in_memory += 0 if placement.used_on_device else shard_nbytes(plan, parts, "fp32")
        in_memory += kept if placement.optimizer is HOST else 0
        in_memory += shard if placement.params is HOST else 0
        files += (kept if placement.optimizer is FILE else 0) + (shard if placement.params is FILE else 0)
        slots.append(kept if placement.optimizer is FILE else 0)
        param_slots.append(shard if placement.params is FILE else 0)
    assert held.memory == in_memory + 3 * max(slots) + 5 * max(param_slots)
    assert held.files == files
    assert held.memory + held.files == sum(held)
    assert all(nbytes % PAGE == 0 for nbytes in (held.memory, held.files))


def test_a_billion_parameters_by_hand() -> None:
    # bf16 with remainders: shard 2, remainder 2 and two fp32 moments of 4 bytes, and a bf16 gradient.
    formats, numel = Formats("remainder", "fp32"), 2**30
    plan = unit([(numel, 2)], 4, formats)
    share = numel // 4
    held = host_bytes([plan], [Placement(HOST, DEVICE)], 0, 4, formats, "bf16", True, 2, 2)
    assert held == HostBytes(4 * share, 8 * share, 0, 2 * share, 0, 0)
    # Parameters that rest on the host are updated where they are: no second copy in the record.
    held = host_bytes([plan], [Placement(HOST, HOST)], 0, 4, formats, "bf16", True, 2, 2)
    assert held == HostBytes(2 * share, 8 * share, 2 * share, 2 * share, 0, 0)
    # All in files, with two slots each.
    held = host_bytes([plan], [Placement(FILE, FILE)], 0, 4, formats, "bf16", False, 2, 2)
    assert held == HostBytes(0, 0, 0, 2 * share, 2 * 12 * share + 2 * 2 * share, 14 * share)


def test_the_table_adds_up() -> None:
    held = HostBytes(3 * MIB, 8 * MIB, 0, 5 * MIB + MIB // 2, 1500 * MIB, 7 * MIB)
    rows = dict(re.match(r"  (.*?) +([\d,.]+) MiB$", line).groups() for line in host_table(held).splitlines())
    numbers = {name: float(text.replace(",", "")) for name, text in rows.items()}
    files = numbers.pop("files")
    assert numbers.pop("host memory in all") == sum(numbers.values()) == held.memory / MIB == 1516.5
    assert files == 7.0
    assert list(numbers) == ["masters", "moments", "gradients", "buffers"]  # what is not there has no line
    assert len({len(line) for line in host_table(held).splitlines()}) == 1


# Where the state of each unit rests: whole units, the first ones on the device, no more than was allowed.

PARTS = 2


def placed(index: int, numel: int, *, requires_grad: bool = True, group: int = 0) -> UnitPlan:
    spec = ParamSpec(f"{index}.weight", numel, "bf16", requires_grad, group)
    return UnitPlan(str(index), "", (spec,), make_layout({spec.name: numel}, PARTS))


def units_of(*numels: int) -> list[UnitPlan]:
    return [placed(index, numel) for index, numel in enumerate(numels)]


several = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([(True, 0), (True, 1), (True, -1), (False, -1), (False, 0)])),
    max_size=12,
).map(lambda rows: [placed(i, numel, requires_grad=on, group=group) for i, (numel, (on, group)) in enumerate(rows)])


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
    units = [placed(0, 64, requires_grad=False, group=-1), placed(1, 64, group=-1), placed(2, 64, requires_grad=False)]
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
