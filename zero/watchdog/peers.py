"""What this rank knows of the other ranks of an engine, and of the store through which it does."""

from __future__ import annotations

import math
import time

from zero.watchdog.hang_report import Record, Seen, View, record_of

PERIOD = 1.0  # seconds between two records of a rank in normal operation
WRITES = 300  # maximum per second for the store from all ranks together
STOPPED = 10.0  # if longer passes between two looks, this process or the store was stopped, and cannot judge others


class Peers:
    """The last-read records of other ranks; the store's thread writes all of it.

    others:   the other ranks; keeps: whether the store ends with this process;
    silence:  seconds without a beat after which a rank counts as stopped or dead;
    moved_at: by rank, the time at which the progress changed; read_at: time.monotonic() of the last reading;
    failed:   why the store is no longer usable, or "";
    answered: time.monotonic() of the store's last answer; -inf if its connection is closed.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], keeper: int | None) -> None:
        self.others = tuple(other for other in ranks if other != rank)
        self.keeps = keeper == rank
        self.silence = 2.0 * max(PERIOD, len(ranks) / WRITES)
        self.moved_at: dict[int, float] = {}
        self.read_at = -math.inf
        self.failed = ""
        self.answered = time.monotonic()
        self._keeper = None if self.keeps else keeper
        self._seen: dict[int, tuple[Record, float]] = {}  # by rank, with the time at which the beat changed

    @property
    def unanswered(self) -> float:
        """Seconds since the store last answered; inf if its connection is closed."""
        return time.monotonic() - self.answered

    def view(self) -> View:
        """The view from the last read."""
        seen = self._seen.copy().items()
        others = {rank: Seen(record, max(0.0, self.read_at - since)) for rank, (record, since) in seen}
        return View(others, self.others, self.silence, self.unanswered, self._keeper)

    def forget(self) -> None:
        """Forget the records: they were of another engine."""
        self._seen = {}

    def read(self, rank: int, value: bytes | None, now: float) -> bool:
        """Take the value of a rank's key, None for one that nobody of this job wrote; False if it is no new record."""
        before, since = self._seen.get(rank, (None, now))
        record = None if value is None else record_of(value)
        if record is None or (before is not None and record.beat < before.beat):
            if before is not None:  # keep the old record, and do not count silence
                self._seen[rank] = (before, now)
            return False
        # A gap in our own reads says nothing about the others: count only from the next read.
        known = before is not None and before.beat == record.beat and now - self.read_at < self.silence
        if before is None or before.progress != record.progress or now - self.read_at > STOPPED:
            self.moved_at[rank] = now
        self._seen[rank] = (record, since if known else now)
        return True
