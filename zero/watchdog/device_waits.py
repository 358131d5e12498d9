"""Waits of the device: NCCL's `wait()` returns at once, and the device's stream waits.

An event is recorded before each wait and one after it. While the first has passed and the second has not, the device
waits; a thread can query that at any time without blocking.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist

from zero.watchdog.rank_status import Collective, Waiting

Event = Any  # has `query` and `synchronize`, as zero.memory.streams.Event, which stands above this floor


class _Ordered(NamedTuple):
    collective: Collective
    before: Event
    after: Event


class DeviceWaits:
    """The device waits of one engine on this rank. Any thread orders one; one thread looks at them.

    record: records an event in the calling thread's current stream.
    """

    def __init__(self, record: Callable[[], Event]) -> None:
        self._record = record
        self._ordered: deque[_Ordered] = deque(maxlen=1 << 14)  # bounded, in case no thread looks at them any more
        self._now: tuple[_Ordered, Waiting] | None = None

    def order(self, works: Iterable[dist.Work], collective: Collective, on_host: bool) -> None:
        """Make the current stream wait for the collective, and this thread, too, if `on_host`."""
        before = self._record()
        for work in works:
            work.wait()
        after = self._record()
        self._ordered.append(_Ordered(collective, before, after))
        if on_host:
            after.synchronize()

    def look(self) -> Waiting | None:
        """The device's current wait, from when it was first seen; the same object as long as it lasts."""
        while self._ordered and self._ordered[0].after.query():
            self._ordered.popleft()
        first = self._ordered[0] if self._ordered else None
        if first is None or not first.before.query():  # no waits are left, or the device still computes
            self._now = None
        elif self._now is None or self._now[0] is not first:
            self._now = first, Waiting(first.collective, time.monotonic())
        return None if self._now is None else self._now[1]
