"""The learnt order of units: what comes next, and when to stay silent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.plan.order import (
    Limits,
    Position,
    advance,
    fetched_ahead,
    read_ahead,
    stay_whole,
    to_come,
    used_again,
    uses,
)

orders = st.lists(st.integers(0, 4), max_size=10)


def nearest(order: list[int], index: int, unit: int) -> int | None:
    """Brute force: the place of `unit` with the fewest steps forward from `index`, going round once."""
    rotated = [(at % len(order)) for at in range(index, index + len(order))] if order else []
    return next((at for at in rotated if order[at] == unit), None)


@settings(deadline=None, max_examples=150)
@given(orders, st.data(), st.booleans())
def test_advance_finds_the_nearest_use_going_round_once(order: list[int], data: st.DataObject, known: bool) -> None:
    index = data.draw(st.integers(0, len(order)))
    unit = data.draw(st.integers(0, 5))
    found = nearest(order, index, unit)
    position = advance(order, Position(index, known), unit)
    assert position == (Position(index, False) if found is None else Position(found + 1, True))


SIZES = [10, 20, 30, 40]
ORDER = [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("limits", "state", "found"),
    [
        (Limits(ahead=0), {}, []),
        (Limits(ahead=1), {}, [1]),
        (Limits(ahead=50), {}, [1, 2]),
        (Limits(ahead=49), {}, [1]),
        (Limits(ahead=1000), {}, [1, 2, 3]),  # what comes behind the unit that is in use would wait in memory
        (Limits(ahead=1000), {"kept": {1}}, [2, 3]),
        (Limits(ahead=70), {"travelling": {1}}, [2]),
        (Limits(ahead=40), {"travelling": {1}}, []),
        (Limits(ahead=5), {"travelling": {1}}, []),
        (Limits(ahead=1000, live=60), {}, [1, 2]),
        (Limits(ahead=1000, live=59), {}, [1]),
        (Limits(ahead=1000, live=29), {}, []),
        (Limits(ahead=1000, live=90), {"kept": {3}}, [1]),
        (Limits(ahead=1000, live=60), {"travelling": {1}}, [2]),
        (Limits(ahead=1000), {"used": {0, 2}}, [1]),
    ],
)
def test_what_is_fetched_ahead_fits_the_bucket_and_the_limit(limits, state, found) -> None:
    given_as = {"used": {0}, **state}
    assert fetched_ahead(to_come(ORDER, Position(1, True)), SIZES, limits, **given_as) == found
    assert fetched_ahead(to_come(ORDER, Position(1, False)), SIZES, limits, **given_as) == []


@pytest.mark.parametrize(
    ("unit", "reuse", "again"),
    [(3, 0, True), (2, 79, False), (2, 80, True), (1, 140, True), (1, 139, False), (0, 10**9, True)],
)
def test_a_unit_stays_if_it_is_used_again_soon(unit: int, reuse: int, again: bool) -> None:
    limits = Limits(reuse=reuse)
    assert used_again(to_come(ORDER, Position(unit + 1, True)), SIZES, limits, unit) == again
    assert not used_again(to_come(ORDER, Position(unit + 1, False)), SIZES, limits, unit)
    assert not used_again(to_come(ORDER, Position(len(ORDER), True)), SIZES, limits, unit)


@pytest.mark.parametrize(
    ("at", "files", "there", "limits", "found"),
    [
        (1, {0, 1, 2, 3}, {0}, Limits(), [1, 2, 3]),
        (1, {0, 1, 2, 3}, {0}, Limits(read=2), [1, 2]),
        (1, {0, 1, 2, 3}, {0, 1}, Limits(read=2), [2, 3]),  # what is there takes no slot
        (1, {1, 3}, {0}, Limits(), [1, 3]),  # the others are in memory
        (4, {0, 1, 2, 3}, {3}, Limits(read=2), [2, 1]),
        (1, {0, 1, 2, 3}, {0}, Limits(ahead=1, live=1, read=3), [1, 2, 3]),  # the limits are of the device's memory
        (1, {0, 1, 2, 3}, {0}, Limits(ahead=0), []),
        (1, {0, 1, 2, 3}, {0}, Limits(read=0), []),
        (8, {0, 1, 2, 3}, {0}, Limits(), []),
    ],
)
def test_what_is_read_ahead_is_what_comes_and_is_not_there(at, files, there, limits, found) -> None:
    assert read_ahead(to_come(ORDER, Position(at, True)), limits, files, there) == found
    assert read_ahead(to_come(ORDER, Position(at, False)), limits, files, there) == []


def test_small_units_stay_whole_up_to_a_sum() -> None:
    sizes = [30, 0, 50, 20, 31, 10]
    assert stay_whole(sizes, Limits()) == []
    assert stay_whole(sizes, Limits(whole=30)) == [0, 3, 5]
    assert stay_whole(sizes, Limits(whole=31, whole_in_all=60)) == [0, 3, 5]
    assert stay_whole(sizes, Limits(whole=31, whole_in_all=59)) == [0, 3]
    assert stay_whole(sizes, Limits(whole=100, whole_in_all=29)) == [3]


def most_whole(*order: Any) -> int:
    return max((use.whole for use in uses(*order)), default=0)


def test_the_most_that_is_whole_at_once_by_hand() -> None:
    """A root that stays whole while its blocks run, of which one travels ahead, or none, or all."""
    anchors, sizes = ["", "blocks.0", "blocks.1", "blocks.2"], [10, 100, 200, 100]

    def most(**limits: int) -> int:
        return most_whole(anchors, sizes, [2 * size for size in sizes], Limits(**limits))

    assert most(ahead=0) == 2 * (10 + 200)
    assert most(ahead=1) == 2 * (10 + 100 + 200)
    assert most() == 2 * sum(sizes)
    assert most(ahead=0, whole=10) == 2 * 200  # the root stays whole and is counted elsewhere
    assert most(ahead=0, reuse=210) == 2 * (10 + 200 + 100)  # the last two blocks are kept for the backward
    assert most_whole([], [], [], Limits()) == 0
