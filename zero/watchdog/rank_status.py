"""This rank's current activity, written by the computing thread and read by the watching threads."""

from __future__ import annotations

import functools
import threading
import time
import zlib
from typing import NamedTuple

from zero.watchdog.hang_report import Blocked, Phase, Record, View, clipped

Among = tuple[tuple[int, ...], int]  # ranks, and an attempt
MOST_OWED = 16  # waits of other ranks in a record: a cycle needs one of each


class Collective(NamedTuple):
    """A collective that this rank has begun; `number` counts them, and `sent` are its bytes that leave this rank.

    ranks: that have a part in it, () where nobody can tell who has begun it;
    turn:  which one it is of those with this name among these ranks, from 1;
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


class FailedWait(NamedTuple):
    """A wait that ended with an error of the transport, and when."""

    waiting: Waiting
    error: str
    at: float


class Begun:
    """The collectives that this rank has begun.

    turns:   how many, by direction and unit, and by ranks and attempt;
    attempt: how often a step has ended with an exception inside attention that ranks share, or behind it;
    attends: whether such attention has begun in this step.
    """

    def __init__(self) -> None:
        self.turns: dict[tuple[str, str], dict[Among, int]] = {}
        self.attempt = 0
        self.attends = False

    def lacks(self, record: Record, rank: int) -> bool:
        """Whether another rank waits for a part of this `rank` that has not begun."""
        there = record.blocked
        waited = [known for key, known in [*self.turns.items()] if Collective(*key, 0).text == record.waits]
        turns = {digest(among): turn for known in waited for among, turn in [*known.items()]}
        if there is None or turns.get(there.among, 0) >= there.turn:
            return False
        if there.needs:
            return rank in there.needs
        return any(digest(among) == there.among for known in [*self.turns.values()] for among in [*known])


class RankStatus:
    """One engine's activity on this rank. Attributes are plain values, each written by one thread, without locks.

    A failed update beside the training loop also writes `error` and `failing`; nothing else matters then.

    waiting: the wait that blocks now, or None; last: the last collective begun;
    loop:    the thread of the training loop; forwards: its forwards that built a graph and have had no
             backward, since the last one;
    owes:    the begin of a wait, and the waits of other ranks for what was not begun then, as rank and begin;
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
        self.begun = Begun()
        self.loop = threading.get_ident()
        self.forwards = 0
        self.owes: tuple[float, tuple[tuple[int, float], ...]] = (0.0, ())
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
        self.begun.attempt += self.begun.attends
        self.begun.attends, self.forwards = False, 0

    def look(self, waiting: Waiting, view: View) -> None:
        """Note which ranks wait for what this rank has not begun, and will not before its own wait ends."""
        lacking = [seen.record for seen in view.others.values() if self.begun.lacks(seen.record, self.rank)]
        owed = tuple((record.rank, record.blocked.since) for record in lacking[:MOST_OWED])
        self.owes = (waiting.since, owed)

    def record(self, beat: int, fault: int) -> Record:
        """The record for other ranks."""
        waiting, last, owes = self.waiting, self.last, self.owes
        blocked = None
        if waiting is not None and waiting.thread == self.loop and (of := waiting.collective).turn:
            owed = owes[1] if owes[0] == waiting.since else ()
            blocked = Blocked(waiting.since, digest((of.ranks, of.attempt)), of.turn, of.needs, owed)
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
            forwards=self.forwards,
            blocked=blocked,
        )


@functools.lru_cache
def digest(among: Among) -> int:
    """These ranks and this attempt as one number, the same on all of them."""
    return zlib.crc32(repr(among).encode())
