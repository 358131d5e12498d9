"""The learnt order of units: what comes next, and when to stay silent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.plan.order import (
    Limits,
    Position,
    advance,
    read_ahead,
    to_come,
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


ORDER = [0, 1, 2, 3, 3, 2, 1, 0]


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
