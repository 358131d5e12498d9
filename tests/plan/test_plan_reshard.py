"""Resharding: copying by `moves` gives the same shards as cutting the parameters anew."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.plan.layout import Layout, make_layout
from zero.plan.reshard import Move, moves

HOSTILE = (0, 1, 2, 15, 16, 17, 31, 32, 33, 97, 128, 129)
numels = st.lists(st.sampled_from(HOSTILE) | st.integers(0, 300), max_size=6)
worlds = st.integers(1, 16)

PADDING = ("padding", -1)
Shard = list[tuple[str, int]]


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def cut(layout: Layout, parts: int) -> list[Shard]:
    """The shards of parameters whose elements say who they are."""
    full: Shard = [PADDING] * layout.numel
    for name, span in layout.spans.items():
        full[span.start : span.stop] = [(name, element) for element in range(span.numel)]
    return [full[span.start : span.stop] for span in (layout.shard(rank, parts) for rank in range(parts))]


def copy(found: tuple[Move, ...], source: list[Shard], layout: Layout, parts: int) -> list[Shard]:
    target: list[Shard] = [[PADDING] * (layout.numel // parts) for _ in range(parts)]
    for move in found:
        piece = source[move.source][move.source_at : move.source_at + move.numel]
        assert len(piece) == move.numel, f"{move} reads over the end of its source"
        assert move.target_at + move.numel <= len(target[move.target]), f"{move} writes over the end of its target"
        assert all(name == move.name for name, _ in piece), f"{move} reads something else"
        target[move.target][move.target_at : move.target_at + move.numel] = piece
    return target


def check(one: Layout, one_parts: int, other: Layout, other_parts: int) -> None:
    found = moves(one, one_parts, other, other_parts)
    assert copy(found, cut(one, one_parts), other, other_parts) == cut(other, other_parts)
    written = Counter((m.target, m.target_at + offset) for m in found for offset in range(m.numel))
    assert set(written.values()) <= {1}, "an element is written twice"
    assert sum(written.values()) == sum(span.numel for span in other.spans.values())
    assert all(move.numel > 0 for move in found)


@settings(deadline=None, max_examples=60)
@given(numels, worlds, worlds, st.data())
def test_moving_is_cutting_anew(sizes: list[int], one: int, other: int, data: st.DataObject) -> None:
    names = {f"p{index}": numel for index, numel in enumerate(sizes)}
    shuffled = {name: names[name] for name in data.draw(st.permutations(list(names)))}
    one_parts = data.draw(st.sampled_from(divisors(one)))
    other_parts = data.draw(st.sampled_from(divisors(other)))
    check(make_layout(names, one), one_parts, make_layout(shuffled, other), other_parts)


@pytest.mark.parametrize(
    ("one", "one_parts", "other", "other_parts"),
    [(1, 1, 4096, 4096), (4096, 4096, 1, 1), (64, 64, 63, 63), (127, 127, 128, 64), (8, 1, 8, 8), (6, 2, 6, 3)],
)
def test_between_worlds_that_share_nothing(one: int, one_parts: int, other: int, other_parts: int) -> None:
    sizes = {"embed": 1009, "none": 0, "bias": 1, "up": 17, "down": 4097}
    check(make_layout(sizes, one), one_parts, make_layout(sizes, other), other_parts)


@settings(deadline=None, max_examples=30)
@given(numels, worlds, st.data())
def test_the_same_cut_moves_everything_to_where_it_was(sizes: list[int], world: int, data: st.DataObject) -> None:
    layout = make_layout({f"p{index}": numel for index, numel in enumerate(sizes)}, world)
    parts = data.draw(st.sampled_from(divisors(world)))
    found = moves(layout, parts, layout, parts)
    assert sum(move.numel for move in found) == sum(sizes)
    assert all((move.source, move.source_at) == (move.target, move.target_at) for move in found)


def test_moves_by_hand() -> None:
    one, two = make_layout({"a": 20, "b": 3}, 1), make_layout({"b": 3, "a": 20}, 2)
    # one: a at 0..20, b at 32..35; two: shards of 32, b at 0..3, a at 16..36 of the buffer
    assert two.numel == 64
    assert moves(one, 1, two, 2) == (
        Move("b", 0, 32, 0, 0, 3),
        Move("a", 0, 0, 0, 16, 16),
        Move("a", 0, 16, 1, 0, 4),
    )


def test_nothing_to_move_gives_no_moves() -> None:
    assert moves(make_layout({}, 4), 4, make_layout({}, 3), 3) == ()
    assert moves(make_layout({"none": 0}, 4), 2, make_layout({"none": 0}, 3), 1) == ()


@pytest.mark.parametrize(
    ("source", "target", "names"),
    [
        ({"a": 3, "b": 4}, {"a": 3, "b": 5}, ["b"]),
        ({"a": 3}, {"a": 3, "new": 1}, ["new"]),
        ({"a": 3, "old": 0}, {"a": 3}, ["old"]),
        ({"z": 1, "a": 3, "m": 2}, {"b": 1, "m": 2, "a": 4}, ["a", "b", "z"]),
        ({}, {"only": 7}, ["only"]),
    ],
)
def test_what_differs_is_named(source: dict[str, int], target: dict[str, int], names: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        moves(make_layout(source, 2), 2, make_layout(target, 3), 3)
    assert str(caught.value) == f"cannot reshard: these parameters differ or are on one side only: {names}"


@pytest.mark.parametrize(("one_parts", "other_parts", "wrong"), [(3, 2, 3), (4, 3, 3), (0, 2, 0), (2, 0, 0)])
def test_parts_that_do_not_divide_a_world_are_refused(one_parts: int, other_parts: int, wrong: int) -> None:
    layout = make_layout({"a": 100}, 4)
    with pytest.raises(ValueError, match=rf"^a layout for 4 ranks cannot be cut into {wrong} shards$"):
        moves(layout, one_parts, layout, other_parts)
