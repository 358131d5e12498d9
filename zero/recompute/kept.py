"""Values of a forward that is recomputed, kept for when it runs again: what the host has read from the device, say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class Values:
    """Those of one call, in the order in which they were made; `around`: of the call that it is inside of."""

    def __init__(self) -> None:
        self._around = _NOW.get()
        self._made: list[Any] = []
        self._next: int | None = None

    @contextlib.contextmanager
    def running(self, again: bool) -> Iterator[None]:
        """Inside, `kept` keeps values here, or gives `again` what it has kept."""
        self._next = 0 if again else None
        token = _NOW.set(self)
        try:
            yield
        finally:
            _NOW.reset(token)

    def give(self, make: Callable[[], T]) -> T:
        """The next value."""
        if self._next is None or self._next == len(self._made):
            self._made.append(make() if self._around is None else self._around.give(make))
            return self._made[-1]
        self._next += 1
        return self._made[self._next - 1]


_NOW: ContextVar[Values | None] = ContextVar("zero_kept_values", default=None)


def kept(make: Callable[[], T]) -> T:
    """`make()`; in a call that is recomputed, what that gave at the same place the first time."""
    values = _NOW.get()
    return make() if values is None else values.give(make)
