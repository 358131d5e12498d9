"""Reports between ranks through the process group's store, written and read by a separate thread.

Each rank has a record of its activity, for hang reports; the barriers of saves send messages. No collective is
involved, and the computing thread never waits for the store: a store whose process is stopped blocks its callers.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import replace

import torch.distributed as dist

from zero.log import logger
from zero.watchdog.hang_report import Seen, View, record_of
from zero.watchdog.messages import Messages
from zero.watchdog.rank_status import RankStatus
from zero.watchdog.signed_store import SignedStore

PERIOD = 1.0  # seconds between two records of a rank in normal operation
HURRY = 0.4  # while this rank reads or fails
WRITES = 300  # maximum per second for the store from all ranks together
STOPPED = 10.0  # if longer passes between two looks, this process or the store was stopped, and cannot judge others


class StatusStore(threading.Thread):
    """Writes this rank's record, reads those of the others while they are wanted, and carries messages.

    Keys belong to one engine of one group of ranks: each group counts its own engines, because a rank may be in
    several groups, with an engine in each, unknown to other ranks.

    ranks:  the global ranks of the engine;
    number: of this engine among those of its ranks, from 1; the same on all of them once they have agreed;
    asks:   how often ranks have said that they wait; a change tells a rank that it may be waited for;
    failed: why the store is no longer usable, or "".
    """

    def __init__(self, status: RankStatus, ranks: tuple[int, ...]) -> None:
        super().__init__(name="zero-status-store", daemon=True)
        self.ranks = ranks
        self.asks = 0
        self.reading = False
        self.failed = ""
        self._wake = threading.Event()
        self.messages = Messages(self._wake.set)
        self._status = status
        self._world = weakref.ref(dist.group.WORLD)
        identity = hashlib.blake2b(repr(sorted(ranks)).encode(), digest_size=8).hexdigest()
        self._store = SignedStore(f"zero/{identity}/", status.rank)
        self.records = RecordReader(rank for rank in ranks if rank != status.rank)
        self._asked = self._told = 0  # lines that this rank has logged, and how many of them the store counts
        self._fault = 0
        self._due = 0.0  # time.monotonic() of the next record
        self._answered = time.monotonic()
        self._ended = False
        self.number = self._count(1)

    @property
    def prefix(self) -> str:
        """The prefix of keys that belong only to this engine."""
        return f"{self.number}/"

    def renumber(self, number: int) -> None:
        """Take the number that the ranks have agreed on, at least this rank's own, and count on from there."""
        if number != self.number:
            self.number = self._count(number - self.number)

    def _count(self, more: int) -> int:
        return self._store.add(f"engines/{self._status.rank}", more)

    @property
    def silence(self) -> float:
        """Seconds without a beat after which a rank counts as stopped or dead."""
        return 2.0 * max(PERIOD, len(self.ranks) / WRITES)

    @property
    def unanswered(self) -> float:
        """Seconds since the store last answered; inf if its connection is closed."""
        return time.monotonic() - self._answered

    def view(self) -> View:
        """The view from the last read."""
        others = {rank: seen for rank, (seen, _) in self.records.seen.copy().items()}
        peers = tuple(rank for rank in self.ranks if rank != self._status.rank)
        return View(others, peers, self.silence, self.unanswered, None if self.keeps else self._store.keeper)

    @property
    def keeps(self) -> bool:
        """Whether the store ends with this process."""
        return self._store.keeper == self._status.rank

    def ask(self) -> None:
        """Tell the others that this rank waits."""
        self._asked += 1
        self.poke()

    def poke(self) -> None:
        """Write and read now, not at the next turn."""
        self._due = 0.0
        self._wake.set()

    def end(self) -> None:
        """Write a last record and stop, once the messages are closed."""
        self._ended = True
        self.poke()

    def run(self) -> None:
        """Run until the end, or until the store is gone."""
        try:
            while True:
                ended = self._ended and not self.messages.open
                # A store whose group was destroyed may block for minutes; a save keeps it open.
                if not self.messages.open and (not dist.is_initialized() or dist.group.WORLD is not self._world()):
                    self.failed = "the process group was destroyed"
                    return
                self._turn()
                if ended:
                    self.failed = "the engine was destroyed"
                    return
                pause = self._due - time.monotonic()
                self._wake.wait(min(pause, self.messages.delay) if self.messages.busy else pause)
                self._wake.clear()
        except Exception as error:  # the store raises various kinds
            self.failed = str(error).strip().partition("\n")[0] or type(error).__name__
            self._answered = -math.inf
            logger.log(logging.DEBUG, "rank %d: the store is gone: %s", self._status.rank, error)
        finally:
            self._store.close()
            self.messages.notify()

    def _turn(self) -> None:
        now = time.monotonic()
        due, wanted = now >= self._due, self.reading or self.messages.waiting
        if due:
            period = HURRY if wanted or self._status.failing else PERIOD
            self._due = now + max(period, len(self.ranks) / WRITES * period)
            self._write()
            if wanted:
                self.records.read(self._store, f"{self.prefix}status/", self.silence)
        if self.messages.busy:
            self.messages.turn(self._store, each=due)
        self._answered = time.monotonic()

    def _write(self) -> None:
        status = self._status
        if status.failing and not self._fault:
            self._fault = self._store.add(self.prefix + "faults", 1)
        elif not status.failing:
            self._fault = 0
        record = status.record(time.monotonic_ns(), self._fault)
        if status.rank == self.ranks[0]:  # all wait for this rank: its progress includes that of the ranks it waits for
            others = (seen.record.progress for seen, _ in self.records.seen.values())
            record = replace(record, progress=sum(others, record.progress))
        self._store.set(f"{self.prefix}status/{status.rank}", record.to_json().encode())
        asked = self._asked
        self.asks = self._store.add(self.prefix + "asks", asked - self._told)
        self._told = asked


class RecordReader:
    """The last-read records of other ranks.

    seen:     by rank, with the time at which the beat changed;
    moved_at: by rank, the time at which the progress changed; read_at: time.monotonic() of the last reading.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.seen: dict[int, tuple[Seen, float]] = {}
        self.moved_at: dict[int, float] = {}
        self.read_at = -math.inf
        self._ranks = tuple(ranks)
        self._prefix = ""

    def read(self, store: SignedStore, prefix: str, silence: float) -> None:
        """Read the existing records."""
        if prefix != self._prefix:  # records seen before the ranks agreed on the number were not this engine's
            self._prefix, self.seen = prefix, {}
        keys = {rank: f"{prefix}{rank}" for rank in self._ranks}
        if not store.has(keys.values()):
            keys = {rank: key for rank, key in keys.items() if store.has([key])}
        values = store.get(list(keys.values()))
        now = time.monotonic()
        for (rank, key), value in zip(keys.items(), values, strict=True):
            before = self.seen.get(rank)
            record = None if value is None else record_of(value)
            if record is None or (before is not None and record.beat < before[0].record.beat):
                store.doubt(key)
                if before is not None:  # keep the old record, and do not count silence
                    self.seen[rank] = (Seen(before[0].record, 0.0), now)
                continue
            # A gap in our own reads says nothing about the others: count only from the next read.
            known = before is not None and before[0].record.beat == record.beat and now - self.read_at < silence
            since = before[1] if known else now
            if before is None or before[0].record.progress != record.progress or now - self.read_at > STOPPED:
                self.moved_at[rank] = now
            self.seen[rank] = (Seen(record, now - since), since)
        self.read_at = now
