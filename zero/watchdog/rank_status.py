"""This rank's current activity, written by the computing thread and read by the watching threads."""

from __future__ import annotations

import time
from typing import NamedTuple

from zero.watchdog.hang_report import Phase, Record, clipped


class Collective(NamedTuple):
    """A collective that this rank has begun; `number` counts them, and `sent` are its bytes that leave this rank."""

    direction: str
    unit: str
    number: int
    sent: int = 0

    def __str__(self) -> str:
        """Its name in messages."""
        return f"{self.text} (#{self.number})"

    @property
    def text(self) -> str:
        """Its name without the number, which may differ between ranks that wait for the same collective."""
        return f"{self.direction} of unit '{self.unit}'" if self.unit else self.direction


class Waiting(NamedTuple):
    """A thread's current wait, and the time.monotonic() at which it began."""

    collective: Collective
    since: float


class FailedWait(NamedTuple):
    """A wait that ended with an error of the transport, and when."""

    waiting: Waiting
    error: str
    at: float


class RankStatus:
    """One engine's activity on this rank. Attributes are plain values, each written by one thread, without locks.

    A failed update beside the training loop also writes `error` and `failing`; nothing else matters then.

    waiting: the wait that blocks now, or None; last: the last collective begun;
    sent:    bytes that have left this rank for others, in messages of the engine;
    error:   the last exception that left the engine; failing: no call has begun since;
    gave_up: why this rank gave up waiting, "" if it has not; missing: the ranks it waited for;
    failed_wait: a failed wait that is not explained yet;
    progress: bytes of a save that this rank has written; several threads count, and only its growth matters.
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
        """Record an exception that leaves the engine."""
        self.error = self.gave_up or f"{type(error).__name__}: {clipped(str(error))} in {self.phase.value}"
        self.failing = True

    def own_error(self) -> str:
        """The prefix of a reason on a rank that raised before: continuing after an error may be why ranks diverged."""
        if not self.error or self.gave_up:
            return ""
        return f"rank {self.rank} raised {clipped(self.error)}{'' if self.failing else ' and went on'}; "

    def record(self, beat: int, fault: int) -> Record:
        """The record for other ranks."""
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
