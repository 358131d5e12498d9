"""The formats of optimizer state, decided before anything runs: which elements, in which blocks, for how many bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.plan.formats import BLOCK, Formats, is_compact, runs
from zero.plan.layout import ALIGNMENT, make_layout
from zero.plan.units import ParamSpec, UnitPlan

COMPACT = ("bf16", "8bit")
shapes = st.lists(
    st.tuples(st.sampled_from([0, 1, 255, 256, 257, 4095, 4096, 4097, 5000, 10_000]), st.integers(1, 3)),
    min_size=1,
    max_size=8,
)


def unit(shapes: list[tuple[int, int]], world: int, alignment: int = BLOCK) -> UnitPlan:
    """A unit of parameters given as (numel, ndim)."""
    specs = tuple(ParamSpec(f"p{i}", numel, "bf16", True, 0, ndim) for i, (numel, ndim) in enumerate(shapes))
    layout = make_layout({spec.name: spec.numel for spec in specs}, world, alignment)
    return UnitPlan("unit", "", specs, layout)


@pytest.mark.parametrize(
    ("numel", "ndim", "compact"),
    [(4096, 2, True), (4095, 2, False), (4096, 1, False), (10**9, 1, False), (4096, 4, True), (10**9, 0, False)],
)
def test_large_matrices_are_compact(numel: int, ndim: int, compact: bool) -> None:
    assert is_compact(numel, ndim) == compact


@settings(deadline=None, max_examples=80)
@given(shapes, st.integers(1, 12), st.sampled_from(COMPACT), st.booleans())
def test_runs_cover_every_shard_in_whole_blocks(
    shapes: list[tuple[int, int]], world: int, moments: str, cut: bool
) -> None:
    plan = unit(shapes, world)
    parts = world if cut else 1
    formats: list[str] = []  # of every block of the unit
    for rank in range(parts):
        window = plan.layout.shard(rank, parts)
        found = runs(plan, window, moments)
        assert found[0].start == 0
        assert found[-1].start + found[-1].numel == window.numel
        for run, after in pairwise(found):
            assert run.start + run.numel == after.start
            assert run.format != after.format, "neighbours of one format are one run"
        for run in found:
            assert run.numel > 0
            assert run.start % BLOCK == run.numel % BLOCK == 0
            formats += [run.format] * (run.numel // BLOCK)
    for spec in plan.params:
        span = plan.layout.spans[spec.name]
        blocks = formats[span.start // BLOCK : -(-span.stop // BLOCK)]
        assert set(blocks) <= {moments if is_compact(spec.numel, spec.ndim) else "fp32"}


def test_bytes_of_moments_and_masters() -> None:
    assert [Formats(moments=kind).alignment for kind in ("fp32", "bf16", "8bit")] == [ALIGNMENT, BLOCK, BLOCK]
    assert Formats(moments="8bit").moments_nbytes(1) == 2 * (1 + 4)
    assert Formats(moments="8bit", states=1).moments_nbytes(256, "fp32") == 1024
    assert [Formats("fp32").master_dtype(dtype) for dtype in ("fp32", "bf16", "fp16")] == [None, "fp32", "fp32"]
    # A remainder is of a bf16 parameter; what else a model holds keeps fp32 masters.
    assert [Formats("remainder").master_dtype(dtype) for dtype in ("fp32", "bf16", "fp16")] == [None, "int16", "fp32"]
