"""Seconds of the phases of a step, and of the waits inside of them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import torch

from zero.monitor.module_calls import Stamp, ended, now, seconds
from zero.watchdog.rank_status import Collective

_DIRECTIONS = {"gather": "gathers", "reduce": "reductions", "replica gather": "reductions"}


class PhaseTimes:
    """Adds up times of a GPU, which is not waited for, or of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: deque[tuple[str, str, Stamp, Stamp]] = deque()  # kind, name, begin and end of those not counted yet
        self._seconds: dict[str, dict[str, float]] = {"phases": {}, "waiting": {}}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time inside towards the phase `name`."""
        self._count()
        start = now(self._device)
        try:
            yield
        finally:
            self._open.append(("phases", name, start, now(self._device)))

    def waited(self, collective: Collective, begun: Stamp, start: Stamp, end: Stamp) -> None:
        """The loop has stood still for a collective, from `start` to `end`."""
        self._open.append(("waiting", _DIRECTIONS.get(collective.direction, "others"), start, end))

    def take(self) -> dict[str, dict[str, float]]:
        """Seconds since the last call by kind, "phases" and "waiting", and name; of a GPU those that have ended."""
        self._count()
        found, self._seconds = self._seconds, {"phases": {}, "waiting": {}}
        return found

    def _count(self) -> None:
        while self._open and ended(self._open[0][3]):
            kind, name, start, end = self._open.popleft()
            spent = self._seconds[kind]
            spent[name] = spent.get(name, 0.0) + seconds(start, end)
