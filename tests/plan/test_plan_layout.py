"""The layout of a flat buffer: every element has one place, and every rank owns an equal, aligned part."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zero.plan.layout import ALIGNMENT, Layout, Span, make_layout

HOSTILE = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 97, 127, 128, 129, 257, 1023, 1024, 1025)
WORLDS = (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 31, 64, 96, 127, 1000, 1024, 4095, 4096)

few_numels = st.lists(st.sampled_from(HOSTILE) | st.integers(0, 400), max_size=8)
any_numels = st.lists(st.sampled_from(HOSTILE) | st.integers(0, 10**10), max_size=12)
any_worlds = st.sampled_from(WORLDS) | st.integers(1, 4096)


def named(numels: list[int]) -> dict[str, int]:
    return {f"p{index}": numel for index, numel in enumerate(numels)}


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def shards(layout: Layout, parts: int) -> list[Span]:
    return [layout.shard(rank, parts) for rank in range(parts)]


@settings(deadline=None, max_examples=80)
@given(any_numels, any_worlds, any_worlds)
def test_parameters_lie_in_order_aligned_whole_and_apart(numels: list[int], world: int, other: int) -> None:
    """And where they start does not depend on the number of ranks; what is between and behind them are the gaps."""
    layout = make_layout(named(numels), world)
    assert layout.spans == make_layout(named(numels), other).spans
    assert all(gap.numel > 0 for gap in layout.gaps)
    parts = sorted(span for span in (*layout.spans.values(), *layout.gaps) if span.numel)
    assert parts[0].start == 0 and parts[-1].stop == layout.numel
    assert all(before.stop == after.start for before, after in pairwise(parts))
    assert list(layout.spans) == list(named(numels))
    end = 0
    for span, numel in zip(layout.spans.values(), numels, strict=True):
        assert span.numel == numel
        assert span.start % ALIGNMENT == 0
        assert end <= span.start < end + ALIGNMENT, "parameters overlap, or lie further apart than alignment asks"
        end = span.stop
    needed, grain = max(end, 1), world * ALIGNMENT
    assert layout.numel % grain == 0
    assert needed <= layout.numel < needed + grain, "padding is what the world needs and no more"


@settings(deadline=None, max_examples=50)
@given(any_numels, any_worlds, st.data())
def test_shards_are_contiguous_equal_aligned_and_never_empty(
    numels: list[int], world: int, data: st.DataObject
) -> None:
    layout = make_layout(named(numels), world)
    parts = data.draw(st.sampled_from(divisors(world)))
    cut = shards(layout, parts)
    assert len({span.numel for span in cut}) == 1
    assert cut[0].start == 0
    assert cut[-1].stop == layout.numel
    assert all(before.stop == after.start for before, after in pairwise(cut))
    assert all(span.start % ALIGNMENT == 0 and span.numel % ALIGNMENT == 0 and span.numel > 0 for span in cut)


@settings(deadline=None, max_examples=50)
@given(few_numels, st.integers(0, 3000), st.integers(0, 3000))
@example([0, 0, 0], 0, 16)
@example([16, 0, 16], 16, 0)
@example([17], 16, 1)
@example([17], 17, 15)
def test_fragments_of_any_window_are_what_slicing_finds(numels: list[int], start: int, numel: int) -> None:
    layout = make_layout(named(numels), 1)
    full: list[tuple[str, int] | None] = [None] * max(layout.numel, start + numel)
    for name, span in layout.spans.items():
        full[span.start : span.stop] = [(name, element) for element in range(span.numel)]
    wanted = {at: element for at, element in enumerate(full[start : start + numel]) if element is not None}
    found = {}
    for piece in layout.fragments(Span(start, numel)):
        assert piece.numel > 0
        for offset in range(piece.numel):
            assert piece.at + offset not in found
            found[piece.at + offset] = (piece.name, piece.start + offset)
    assert found == wanted


@pytest.mark.parametrize(("parts", "world"), [(0, 4), (-1, 4), (3, 4), (8, 4), (5, 4), (2, 3), (4096, 2048)])
def test_a_cut_that_does_not_divide_the_world_is_refused(parts: int, world: int) -> None:
    with pytest.raises(ValueError) as caught:
        make_layout({"w": 5}, world).shard(0, parts)
    assert str(caught.value) == f"a layout for {world} ranks cannot be cut into {parts} shards"
