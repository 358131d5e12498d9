"""The events of one engine, for subscribers; without any, an event costs a look at an empty list."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

Stamp = Any  # a time: a float of time.perf_counter(), or an event of a GPU's stream
Span = Callable[[str, str], AbstractContextManager[Any]]  # (verb, unit) -> around the work
Waited = Callable[[Any, Stamp, Stamp, Stamp], None]  # a Collective, its begin, and one wait for it: begin, end
_NOTHING = contextlib.nullcontext()


class Events:
    """The events of one engine on this rank. Subscribers are called on the thread that does the work.

    Spans are of work on a unit (gather, release, reduce, sum, update, copy, write, "wait read", "wait update") or of a
    call of the engine (the name of its phase, and no unit).

    clock: returns the current time, of the device that waits end on.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], Stamp] = time.perf_counter
        self._spans: tuple[Span, ...] = ()
        self._waits: tuple[Waited, ...] = ()
        self._begun: dict[int, Stamp] = {}  # by number of the collective, while waits have subscribers

    def subscribe(self, span: Span | None = None, waited: Waited | None = None) -> Callable[[], None]:
        """Subscribe to spans, waits, or both; returns a function that ends the subscription."""
        self._spans += () if span is None else (span,)
        self._waits += () if waited is None else (waited,)

        def end() -> None:
            self._spans = tuple(each for each in self._spans if each is not span)
            self._waits = tuple(each for each in self._waits if each is not waited)

        return end

    def span(self, verb: str, unit: str = "") -> AbstractContextManager[Any]:
        """Around work on a unit, or a call of the engine."""
        return self._each(verb, unit) if self._spans else _NOTHING

    def began(self, number: int) -> None:
        """Record the begin of a collective."""
        if self._waits:
            self._begun[number] = self.clock()

    @contextlib.contextmanager
    def waiting(self, collective: Any) -> Iterator[None]:
        """Around a wait for a collective."""
        if not self._waits:
            yield
            return
        start = self.clock()
        yield
        begun, end = self._begun.get(collective.number, start), self.clock()
        for told in self._waits:
            told(collective, begun, start, end)
        if len(self._begun) > 2 * _KEPT:  # another thread may add one meanwhile
            for number in sorted(self._begun)[:_KEPT]:
                self._begun.pop(number, None)

    @contextlib.contextmanager
    def _each(self, verb: str, unit: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for span in self._spans:
                stack.enter_context(span(verb, unit))
            yield


_KEPT = 1000  # begins of collectives to keep: never more are in flight
