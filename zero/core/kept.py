"""Values of a forward that is recomputed, kept for when it runs again: what the host has read from the device, say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class Values:
    """Those of one call, in their order; a call inside of another one takes them from there when it is made anew."""

    def __init__(self) -> None:
        self._around = _NOW.get()
        self._made: list[Any] = []
        self._given = 0  # of them, since the call began

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The call runs, for the first time or again."""
        self._given = 0
        token = _NOW.set(self)
        try:
            yield
        finally:
            _NOW.reset(token)

    def give(self, make: Callable[[], T]) -> T:
        """The next value: one that is kept, or a new one."""
        if self._given == len(self._made):
            self._made.append(make() if self._around is None else self._around.give(make))
        self._given += 1
        return self._made[self._given - 1]


_NOW: ContextVar[Values | None] = ContextVar("zero_kept_values", default=None)


def kept(make: Callable[[], T]) -> T:
    """`make()`; in a call that runs again, what that gave at the same place the first time."""
    values = _NOW.get()
    return make() if values is None else values.give(make)
