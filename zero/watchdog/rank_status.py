"""This rank's current activity, written by the computing thread and read by the watching threads."""

from __future__ import annotations

import functools
import threading
import time
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from zero.watchdog.hang_report import NOT_BLOCKED, Blocked, Phase, Record, View, clipped

Among = tuple[tuple[int, ...], int]  # ranks, and an attempt
MOST_OWED = 16  # waits of other ranks in a record: a cycle needs one of each


class Collective(NamedTuple):
    """A collective that this rank has begun; `number` counts them, and `sent` are its bytes that leave this rank.

    ranks: that have a part in it, () where nobody can tell who has begun it;
    turn:  which one it is of those with this text among these ranks, from 1;
    needs: the ranks whose part is waited for, () for all of `ranks`;
    attempt: of the rank at its step, for what must not meet anything of an attempt that another rank has left.
    """

    direction: str
    unit: str
    number: int
    sent: int = 0
    ranks: tuple[int, ...] = ()
    turn: int = 0
    needs: tuple[int, ...] = ()
    attempt: int = 0

    def __str__(self) -> str:
        """Its name in messages."""
        return f"{self.text} (#{self.number})"

    @property
    def text(self) -> str:
        """Its name without the number, which may differ between ranks that wait for the same collective."""
        return f"{self.direction} of unit '{self.unit}'" if self.unit else self.direction


class Waiting(NamedTuple):
    """A thread's current wait, the time.monotonic() at which it began, and the thread; 0: the device waits."""

    collective: Collective
    since: float
    thread: int = 0


@dataclass
class Attempt:
    """The running step as this rank tries it.

    number:   how many before have ended with an exception inside attention that ranks share, or behind it;
    attends:  whether such attention has begun in this one;
    forwards: that built a graph and have had no backward, since the last one.
    """

    number: int = 0
    attends: bool = False
    forwards: int = 0


class FailedWait(NamedTuple):
    """A wait that ended with an error of the transport, and when."""

    waiting: Waiting
    error: str
    at: float


class RankStatus:
    """One engine's activity on this rank. Attributes are plain values, each written by one thread, without locks.

    A failed update beside the training loop also writes `error` and `failing`; nothing else matters then.

    waiting: the wait that blocks now, or None; last: the last collective begun;
    begun:   how many collectives have begun, by text and by ranks and attempt;
    attempt: at the running step;
    loop:    the thread of the training loop;
    owes:    a wait of this thread, and the waits of other ranks for what it has not begun, as rank and begin;
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
        self.begun: dict[str, dict[Among, int]] = {}
        self.attempt = Attempt()
        self.loop = threading.get_ident()
        self.owes: tuple[Waiting | None, tuple[tuple[int, float], ...]] = (None, ())
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

    def abandon(self) -> None:
        """The step has ended with an exception, perhaps on this rank alone."""
        self.attempt = Attempt(self.attempt.number + self.attempt.attends)

    def count(self, begun: Collective) -> int:
        """Count one more collective with its text among its ranks; returns its turn, 0 without ranks."""
        turns, among = self.begun.setdefault(begun.text, {}), (begun.ranks, begun.attempt)
        turns[among] = turns.get(among, 0) + bool(begun.ranks)
        return turns[among]

    def look(self, waiting: Waiting, view: View) -> None:
        """Note which ranks wait for what this rank has not begun, and will not before its own wait ends."""
        records = [seen.record for seen in view.others.values()]
        records = [record for record in records if record.blocked.turn and self._lacks(record)]
        owed = tuple((record.rank, record.blocked.since) for record in records[:MOST_OWED])
        self.owes = (waiting, owed if waiting.thread == self.loop else ())

    def _lacks(self, record: Record) -> bool:
        """Whether that rank waits for a part of this one that has not begun."""
        turns = {digest(among): turn for among, turn in [*self.begun.get(record.waits, {}).items()]}
        if turns.get(record.blocked.among, 0) >= record.blocked.turn:
            return False
        if record.blocked.needs:
            return self.rank in record.blocked.needs
        return any(digest(among) == record.blocked.among for known in [*self.begun.values()] for among in [*known])

    def record(self, beat: int, fault: int) -> Record:
        """The record for other ranks."""
        waiting, last, owes = self.waiting, self.last, self.owes
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
            forwards=self.attempt.forwards,
            blocked=_blocked(waiting) if waiting is not None and waiting.thread == self.loop else NOT_BLOCKED,
            owes=owes[1] if owes[0] is waiting else (),
        )


def _blocked(waiting: Waiting) -> Blocked:
    what = waiting.collective
    return Blocked(waiting.since, digest((what.ranks, what.attempt)), what.turn, what.needs)


@functools.lru_cache
def digest(among: Among) -> int:
    """These ranks and this attempt as one number, the same on all of them."""
    return zlib.crc32(repr(among).encode())
