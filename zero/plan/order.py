"""What comes next: the order in which units are used, learnt in one step and followed in the later ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Position(NamedTuple):
    """A place in a learnt order: the index just after the last use, and whether that use was foreseen."""

    index: int
    known: bool


START = Position(0, True)


def advance(order: Sequence[int], position: Position, unit: int) -> Position:
    """The position after `unit` was used: its next occurrence at or after `position`, else from the start.

    A unit that the order does not hold leaves the index where it was and reports `known=False`: the model
    took another path, and nothing should be foretold until it is back on a known one.
    """
    for start, stop in ((position.index, len(order)), (0, position.index)):
        for index in range(start, stop):
            if order[index] == unit:
                return Position(index + 1, True)
    return Position(position.index, False)


def upcoming(order: Sequence[int], position: Position) -> int | None:
    """The unit that the order expects next; None at its end or when the last use was not foreseen."""
    if position.known and position.index < len(order):
        return order[position.index]
    return None
