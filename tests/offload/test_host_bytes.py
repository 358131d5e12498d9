"""Bytes off the device, computed before anything is allocated: records hold what a step needs, and tables add up."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.kernels.moments import Moment
from zero.memory.host_bytes import (
    LINE,
    MIB,
    PAGE,
    HostBytes,
    gradient_nbytes,
    host_bytes,
    host_table,
    keeps_copy,
    parameter_nbytes,
    record,
)
from zero.plan.formats import ITEMSIZE, Formats, runs
from zero.plan.layout import make_layout
from zero.plan.placement import Placement, Where, place
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


def test_a_record_by_hand() -> None:
    # A matrix of 4096 in 8 bit and a vector of 100, padded to 256, in fp32; one rank, Adam, remainders.
    formats = Formats("remainder", "8bit")
    plan = unit([(4096, 2), (100, 1)], 1, formats)
    assert record(plan, 0, 1, formats, True) == (
        (
            ("shard", "bf16", 4352, 0),
            ("master", "int16", 4352, 8704),
            ("moment 0.0", "uint8", 4096, 17408),
            ("scales 0.0", "fp32", 16, 21504),
            ("moment 1.0", "uint8", 4096, 21568),
            ("scales 1.0", "fp32", 16, 25664),
            ("moment 0.1", "fp32", 256, 25728),
            ("moment 1.1", "fp32", 256, 26752),
        ),
        7 * PAGE,
    )
    names = [entry.name for entry in record(plan, 0, 1, formats, False).entries]
    assert names[0] == "master"
    assert "shard" not in names


@pytest.mark.parametrize(
    ("dtype", "mirrored", "entries"),
    [
        ("fp32", False, []),  # the parameter is the master, where it is
        ("fp32", True, ["shard"]),
        ("bf16", False, ["master"]),
        ("fp16", True, ["shard", "master"]),
    ],
)
def test_who_has_a_master(dtype: str, mirrored: bool, entries: list[str]) -> None:
    formats = Formats(states=0)
    made = record(unit([(100, 1)], 2, formats, dtype), 1, 2, formats, mirrored)
    assert [entry.name for entry in made.entries] == entries
    assert made.moments_at == made.nbytes


@settings(deadline=None, max_examples=200)
@given(shapes, formats_of, dtypes, st.booleans(), st.integers(1, 4), st.data())
def test_a_record_has_room_for_what_a_step_needs(
    shapes: list[tuple[int, int]], formats: Formats, dtype: str, mirrored: bool, parts: int, data: st.DataObject
) -> None:
    plan = unit(shapes, parts, formats, dtype)
    rank = data.draw(st.integers(0, parts - 1))
    made = record(plan, rank, parts, formats, mirrored)
    end = 0
    for entry in made.entries:
        assert entry.offset % LINE == 0
        assert end <= entry.offset < end + LINE
        end = entry.offset + entry.nbytes
    assert end <= made.nbytes < end + PAGE
    assert made.nbytes % PAGE == 0
    sizes = {entry.name: entry.nbytes for entry in made.entries}
    window = plan.layout.shard(rank, parts)
    assert sizes.pop("shard", 0) == (ITEMSIZE[dtype] * window.numel if mirrored else 0)
    assert sizes.pop("master", 0) == formats.master_nbytes(window.numel, dtype)
    kept = {}
    for index, run in enumerate(runs(plan, window, formats.moments)):
        moment = Moment.filled(run.numel, run.format, 0.0, "cpu", True)  # what the kernels take
        for state in range(formats.states):
            kept[f"moment {state}.{index}"] = moment.values.nbytes
            if moment.scales is not None:
                kept[f"scales {state}.{index}"] = moment.scales.nbytes
    assert sizes == kept


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
        kept = record(plan, rank, parts, formats, keeps_copy(placement, mirrored)).nbytes
        shard = parameter_nbytes(plan, parts)
        in_memory += gradient_nbytes(plan, parts, "fp32") if placement.optimizer is not DEVICE else 0
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


def test_a_frozen_unit_has_parameters_only() -> None:
    formats = Formats()
    plan = unit([(5000, 2)], 1, formats, trained=False)
    assert record(plan, 0, 1, formats, True) == ((), 0)
    held = host_bytes([plan], place([plan], 1, HOST, HOST), 0, 1, formats, "bf16", True, 2, 2)
    assert held == HostBytes(0, 0, parameter_nbytes(plan, 1), 0, 0, 0)


def test_the_table_adds_up() -> None:
    held = HostBytes(3 * MIB, 8 * MIB, 0, 5 * MIB + MIB // 2, 1500 * MIB, 7 * MIB)
    rows = dict(re.match(r"  (.*?) +([\d,.]+) MiB$", line).groups() for line in host_table(held).splitlines())
    numbers = {name: float(text.replace(",", "")) for name, text in rows.items()}
    files = numbers.pop("files")
    assert numbers.pop("host memory in all") == sum(numbers.values()) == held.memory / MIB == 1516.5
    assert files == 7.0
    assert list(numbers) == ["masters", "moments", "gradients", "buffers"]  # what is not there has no line
    assert len({len(line) for line in host_table(held).splitlines()}) == 1
