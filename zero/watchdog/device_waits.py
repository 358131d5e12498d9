"""Waits that the host has only ordered: NCCL's `wait()` returns at once, and the device's stream is what waits.

Whoever orders one has an event recorded before it and one after. As long as the first has passed and the second has
not, the device waits; a thread can ask for that at any time, and blocks nobody.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch.distributed as dist

from zero.watchdog.rank_status import Collective, Waiting


class Event(Protocol):
    """Something recorded in a stream, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the stream has come past it."""

    def synchronize(self) -> None:
        """Block until it has."""


class _Ordered(NamedTuple):
    collective: Collective
    before: Event
    after: Event


class DeviceWaits:
    """Those of one engine on this rank. Any thread orders one; one thread looks at them.

    record:  puts an event into the stream that the calling thread works in;
    looking: held by that thread while it asks the device.
    """

    def __init__(self, record: Callable[[], Event]) -> None:
        self.looking = threading.Lock()
        self._record = record
        self._ordered: deque[_Ordered] = deque(maxlen=1 << 14)  # nobody may be left who looks at them
        self._now: tuple[_Ordered, Waiting] | None = None

    def order(self, works: Iterable[dist.Work], collective: Collective, on_host: bool) -> None:
        """Have the current stream wait for the collective, and this thread, too, if `on_host`."""
        before = self._record()
        for work in works:
            work.wait()
        after = self._record()
        self._ordered.append(_Ordered(collective, before, after))
        if on_host:
            after.synchronize()

    def look(self) -> Waiting | None:
        """The wait that the device is in, since it was first seen there; the same object as long as it lasts."""
        with self.looking:
            while self._ordered and self._ordered[0].after.query():
                self._ordered.popleft()
            first = self._ordered[0] if self._ordered else None
            begun = first is not None and first.before.query()
        if not begun:  # nothing is left, or the device still computes
            self._now = None
        elif self._now is None or self._now[0] is not first:
            self._now = first, Waiting(first.collective, time.monotonic())
        return None if self._now is None else self._now[1]
