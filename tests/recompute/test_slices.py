"""The promise: tiles cover everything once, in order, and none is too small for a fast product."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero.plan.units import ModuleNode, ParamSpec, plan_units
from zero.tiled.slices import FEWEST_ROWS, default_size, even_parts, token_slices


@given(st.integers(0, 5000), st.integers(1, 6000))
def test_slices_cover_all_tokens_once_and_in_order(tokens: int, size: int) -> None:
    slices = token_slices(tokens, size)
    assert [token for part in slices for token in part] == list(range(tokens))
    assert all(len(part) == size for part in slices[:-1])
    assert max(map(len, slices), default=0) < size + FEWEST_ROWS
    if len(slices) > 1:
        assert len(slices[-1]) >= min(size, FEWEST_ROWS)


def test_a_small_rest_joins_the_slice_before_it() -> None:
    assert [len(part) for part in token_slices(79, 64)] == [79]
    assert [len(part) for part in token_slices(80, 64)] == [64, 16]
    assert [len(part) for part in token_slices(10, 4)] == [4, 6]
    assert token_slices(0, 4) == []


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_default_grows_with_the_tokens_within_bounds(on_gpu: bool) -> None:
    sizes = [default_size(tokens, 64, on_gpu) for tokens in (0, 1, 1000, 2000, 8000, 10**6)]
    assert sizes == sorted(sizes)
    assert sizes[0] >= FEWEST_ROWS
    assert sizes[-1] == default_size(10**9, 64, on_gpu)


@given(st.integers(1, 5000), st.integers(1, 100))
def test_parts_are_even(numel: int, parts: int) -> None:
    sizes = even_parts(numel, parts)
    assert sum(sizes) == numel
    assert len(sizes) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def tree(leaf: bool) -> tuple[ModuleNode, list[ParamSpec]]:
    """A root with one block; in it a tile that is apart, and a plain layer."""
    tile = ModuleNode("blocks.0.tile", "Linear", ("blocks.0.tile.weight",), apart=True)
    plain = ModuleNode("blocks.0.plain", "Linear", ("blocks.0.plain.weight",))
    block = ModuleNode("blocks.0", "Block", (), (tile, plain), leaf=leaf)
    root = ModuleNode("", "Net", (), (ModuleNode("blocks", "ModuleList", (), (block,), repeats=True),))
    return root, [ParamSpec(f"blocks.0.{name}.weight", 10, "fp32", True, 0, 2) for name in ("tile", "plain")]


@pytest.mark.parametrize("patterns", [(), ("Block",), ("Net",), ("*.tile",), ("Block", "*.tile")])
def test_what_is_apart_is_a_unit_of_its_own_inside_of_any_block(patterns: tuple[str, ...]) -> None:
    units = plan_units(*tree(leaf=False), 2, patterns)
    assert [[spec.name for spec in unit.params] for unit in units] == [
        ["blocks.0.tile.weight"],
        ["blocks.0.plain.weight"],
    ]
    assert units[0].anchor == "blocks.0.tile"


def test_a_leaf_is_gathered_at_once_with_what_is_apart_in_it() -> None:
    (unit,) = plan_units(*tree(leaf=True), 2)
    assert (unit.anchor, len(unit.params)) == ("blocks.0", 2)
