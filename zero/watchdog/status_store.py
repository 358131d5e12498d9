"""The side channel: each rank's record in the process group's store, written and read by a thread of its own.

No collective is involved, and the thread that computes never waits for the store. A store whose process is
stopped blocks whoever asks it, so only this thread does; everybody else looks at what it saw last.

Anybody can write to the store who reaches its port: a record counts where it is signed with the job's secret.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time

import torch.distributed as dist

from zero.log import logger
from zero.watchdog.hang_report import Seen, View, record_of
from zero.watchdog.rank_status import RankStatus
from zero.watchdog.signed import Signed

PERIOD = 1.0  # seconds between two records of a rank in peace
HURRY = 0.4  # while this rank reads or fails
WRITES = 300  # per second that the store sees of all ranks together, at most


class StatusStore(threading.Thread):
    """Writes this rank's record, and reads those of the others while `reading` is set.

    number: of this engine among those of its process group, from 1; the same on all ranks once they have agreed;
    prefix: of the keys in the store that belong to this engine alone;
    asks:   how often ranks have said that they wait; a change tells a rank that it may be waited for.
    """

    def __init__(self, status: RankStatus, size: int, group: dist.ProcessGroup) -> None:
        super().__init__(name="zero-store", daemon=True)
        self.asks = 0
        self.reading = False
        self.listeners = 0  # who else wants the records of the others
        self.read_at = -math.inf  # time.monotonic() of the last complete reading
        self._status = status
        self._size = size
        self._world = dist.group.WORLD
        self._period, self._hurry = max(PERIOD, size / WRITES), max(HURRY, size / WRITES / 2)
        self._asked = self._told = 0  # lines that this rank has said, and how many of them the store knows of
        self._beat = self._fault = 0
        self._seen: dict[int, tuple[Seen, float]] = {}  # with the time at which the beat changed
        self._read_from: dict[int, str] = {}  # keys by rank
        self._signed = Signed(status.rank)
        self._answered = time.monotonic()
        self._gone = False  # the connection to the store is closed
        self._wake = threading.Event()
        self._ended = False
        store = dist.distributed_c10d._get_default_store()
        self._store = store.clone() if hasattr(store, "clone") else store
        self._keeper = _keeper(store)
        # Of the group, because in another one another process has this rank. In each, engines are made in one order.
        self._keys = f"zero/{group.group_name}/"
        self.number = self._count(1)

    @property
    def prefix(self) -> str:
        """See the class."""
        return f"{self._keys}engine/{self.number}/"

    def renumber(self, number: int) -> None:
        """Take the number that the ranks have agreed about, not below this rank's own, and count on from there."""
        if number != self.number:
            self.number = self._count(number - self.number)

    def _count(self, more: int) -> int:
        return self._store.add(f"{self._keys}engines/{self._status.rank}", more)

    @property
    def silence(self) -> float:
        """Seconds without a beat from which on a rank counts as stopped or dead."""
        return 2.0 * self._period

    def view(self) -> View:
        """What was read last."""
        now = time.monotonic()
        others = {rank: seen for rank, (seen, _) in self._seen.copy().items()}
        store = math.inf if self._gone else now - self._answered
        return View(others, self._size, self.silence, store, None if self.keeps else self._keeper)

    @property
    def keeps(self) -> bool:
        """Whether the store goes when this process does."""
        return self._keeper == self._status.rank

    def ask(self) -> None:
        """Tell the others that this rank waits."""
        self._asked += 1
        self._wake.set()

    def poke(self) -> None:
        """Write and read now, not at the next turn."""
        self._wake.set()

    def end(self) -> None:
        """Write a last record and stop."""
        self._ended = True
        self._wake.set()

    def run(self) -> None:
        """Until the end, or until the store is gone."""
        while True:
            ended = self._ended
            # A store whose group was destroyed may block for minutes.
            if not dist.is_initialized() or dist.group.WORLD is not self._world:
                return
            try:
                self._turn()
            except Exception as error:  # of whatever kind the store raises
                self._gone = True
                logger.log(logging.DEBUG, "rank %d: the store is gone: %s", self._status.rank, error)
                return
            if ended:
                return
            self._wake.wait(self._hurry if self.reading or self.listeners or self._status.failing else self._period)
            self._wake.clear()

    def _turn(self) -> None:
        status = self._status
        if status.failing and not self._fault:
            self._fault = self._store.add(self.prefix + "faults", 1)
        elif not status.failing:
            self._fault = 0
        self._beat += 1
        key, record = self._key(status.rank), status.record(self._beat, self._fault)
        self._store.set(key, self._signed.sign(key, record.to_json().encode()))
        asked = self._asked
        self.asks = self._store.add(self.prefix + "asks", asked - self._told)
        self._told = asked
        if self.reading or self.listeners:
            self._read()
        self._answered = time.monotonic()

    def _read(self) -> None:
        keys = {rank: self._key(rank) for rank in range(self._size) if rank != self._status.rank}
        if keys != self._read_from:  # what was seen before the ranks had agreed on the number was not of this engine
            self._read_from, self._seen = keys, {}
        if not self._store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        texts = self._store.multi_get(list(keys.values())) if keys else []
        now = time.monotonic()
        for (rank, key), text in zip(keys.items(), texts, strict=True):
            before = self._seen.get(rank)
            value = self._signed.read(key, bytes(text))
            record = None if value is None else record_of(value)
            if record is None or (before is not None and record.beat < before[0].record.beat):
                self._signed.doubt(key)
                if before is not None:  # what is known of it stays, and it does not grow silent
                    self._seen[rank] = (Seen(before[0].record, 0.0), now)
                continue
            # A gap in our own readings says nothing about the others: count only from when we look again.
            known = before is not None and before[0].record.beat == record.beat and now - self.read_at < self.silence
            since = before[1] if known else now
            self._seen[rank] = (Seen(record, now - since), since)
        self.read_at = now

    def _key(self, rank: int) -> str:
        return f"{self.prefix}{rank}"


def _keeper(store: dist.Store) -> int | None:
    """The rank whose process answers for the store: rank 0, as torch makes it, unless a launcher or a file does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not launched else None
