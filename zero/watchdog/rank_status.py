"""What this rank is doing, written by the thread that computes and read by those that watch."""

from __future__ import annotations

import time
from typing import NamedTuple

from zero.watchdog.hang_report import Phase, Record, clipped


class Collective(NamedTuple):
    """One that this rank has begun; `number` counts them, and `sent` are the bytes that leave this rank in it."""

    direction: str
    unit: str
    number: int
    sent: int = 0

    def __str__(self) -> str:
        """As it stands in messages."""
        return f"{self.text} (#{self.number})"

    @property
    def text(self) -> str:
        """Without the number, which may differ between ranks that wait for the same."""
        return f"{self.direction} of unit '{self.unit}'" if self.unit else self.direction


class Waiting(NamedTuple):
    """The wait that a thread is in, and the time.monotonic() at which it began."""

    collective: Collective
    since: float


class FailedWait(NamedTuple):
    """A wait that ended with an error of the transport, and when."""

    waiting: Waiting
    error: str
    at: float


class RankStatus:
    """What one engine does on this rank. Attributes are plain values, each written by one thread; no lock is needed.

    Only an update beside the training loop that fails writes `error` and `failing`, too; nothing else counts then.

    waiting: the wait that blocks now, or None; last: the collective begun last;
    sent:    bytes that have left this rank for others, in messages of the engine;
    error:   the last exception that left the engine; failing: and no call has begun since;
    gave_up: why this rank gave up waiting, "" while it has not; missing: for want of whom;
    failed_wait: one that failed and is not explained yet;
    progress: what this rank has got done of a save, in bytes; several threads count, and only that it moves matters.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.phase = Phase.OUTSIDE
        self.steps = 0
        self.number = 0
        self.sent = 0
        self.last: Collective | None = None
        self.waiting: Waiting | None = None
        self.error = ""
        self.failing = False
        self.gave_up = ""
        self.missing: tuple[int, ...] = ()
        self.failed_wait: FailedWait | None = None
        self.progress = 0

    def fail(self, error: BaseException) -> None:
        """An exception leaves the engine."""
        self.error = self.gave_up or f"{type(error).__name__}: {clipped(str(error))} in {self.phase.value}"
        self.failing = True

    def own_error(self) -> str:
        """How the reason begins on a rank that raised before: who went on after an error may be why ranks parted."""
        if not self.error or self.gave_up:
            return ""
        return f"rank {self.rank} raised {clipped(self.error)}{'' if self.failing else ' and went on'}; "

    def record(self, beat: int, fault: int) -> Record:
        """What other ranks may know."""
        waiting, last = self.waiting, self.last
        return Record(
            rank=self.rank,
            beat=beat,
            phase=self.phase,
            steps=self.steps,
            number=self.number,
            last=str(last) if last is not None else "",
            waits=waiting.collective.text if waiting is not None else "",
            wait=waiting.collective.number if waiting is not None else 0,
            seconds=round(time.monotonic() - waiting.since, 1) if waiting is not None else 0.0,
            error=clipped(self.error),
            fault=fault,
            missing=self.missing,
            gave_up=bool(self.gave_up),
            progress=self.progress,
        )
