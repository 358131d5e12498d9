"""Reports between ranks through the process group's store, written and read by a separate thread.

Each rank has a record of its activity, for hang reports; the barriers of saves send messages. No collective is
involved, and the computing thread never waits for the store: a store whose process is stopped blocks its callers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from dataclasses import replace

import torch.distributed as dist

from zero.log import logger
from zero.watchdog.peers import PERIOD, WRITES
from zero.watchdog.rank_status import RankStatus
from zero.watchdog.store_barrier import StoreBarrier

HURRY = 0.4  # seconds between two records while this rank reads or fails


class StatusStore(threading.Thread):
    """Writes this rank's record, reads those of the others while they are wanted, and carries a barrier's values.

    asks: how often ranks have said that they wait; a change tells a rank that it may be waited for.
    """

    def __init__(self, status: RankStatus, barrier: StoreBarrier) -> None:
        super().__init__(name="zero-status-store", daemon=True)
        self.asks = 0
        self.reading = False
        self.barrier = barrier
        self.peers = barrier.peers
        self._status = status
        self._world = weakref.ref(dist.group.WORLD)
        self._prefix = barrier.prefix  # of the records that were read
        self._asked = self._told = 0  # lines that this rank has logged, and how many of them the store counts
        self._fault = 0
        self._due = 0.0  # time.monotonic() of the next record
        self._ended = False

    def ask(self) -> None:
        """Tell the others that this rank waits."""
        self._asked += 1
        self.poke()

    def poke(self) -> None:
        """Write and read now, not at the next turn."""
        self._due = 0.0
        self.barrier.wake.set()

    def end(self) -> None:
        """Write a last record and stop, once the barrier is closed."""
        self._ended = True
        self.poke()

    def run(self) -> None:
        """Run until the end, or until the store is gone."""
        barrier, peers = self.barrier, self.peers
        try:
            while True:
                ended = self._ended and not barrier.open
                # A store whose group was destroyed may block for minutes; a save keeps it open.
                if not barrier.open and (not dist.is_initialized() or dist.group.WORLD is not self._world()):
                    peers.failed = "the process group was destroyed"
                    return
                self._turn()
                if ended:
                    peers.failed = "the engine was destroyed"
                    return
                pause = self._due - time.monotonic()
                barrier.wake.wait(min(pause, barrier.delay) if barrier.busy else pause)
                barrier.wake.clear()
        except Exception as error:  # the store raises various kinds
            peers.failed = str(error).strip().partition("\n")[0] or type(error).__name__
            peers.answered = -math.inf
            logger.log(logging.DEBUG, "rank %d: the store is gone: %s", self._status.rank, error)
        finally:
            barrier.release()

    def _turn(self) -> None:
        now = time.monotonic()
        due, wanted = now >= self._due, self.reading or self.barrier.waiting
        if due:
            period = HURRY if wanted or self._status.failing else PERIOD
            self._due = now + max(period, len(self.barrier.ranks) / WRITES * period)
            self._write()
            if wanted:
                self._read()
        if self.barrier.busy:
            self.barrier.turn(each=due)
        self.peers.answered = time.monotonic()

    def _write(self) -> None:
        status, barrier = self._status, self.barrier
        if status.failing and not self._fault:
            self._fault = barrier.store.add(barrier.prefix + "faults", 1)
        elif not status.failing:
            self._fault = 0
        record = status.record(time.monotonic_ns(), self._fault)
        if barrier.rank == 0:  # all wait for this rank: its progress includes that of the ranks it waits for
            others = (seen.record.progress for seen in self.peers.view().others.values())
            record = replace(record, progress=sum(others, record.progress))
        barrier.set(f"{barrier.prefix}status/{status.rank}", record.to_json().encode())
        asked = self._asked
        self.asks = barrier.store.add(barrier.prefix + "asks", asked - self._told)
        self._told = asked

    def _read(self) -> None:
        """Read the existing records."""
        barrier, peers = self.barrier, self.peers
        if barrier.prefix != self._prefix:  # records seen before the ranks agreed on the number were not this engine's
            self._prefix = barrier.prefix
            peers.forget()
        keys = {rank: f"{self._prefix}status/{rank}" for rank in peers.others}
        if not barrier.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if barrier.store.check([key])}
        values = barrier.get(list(keys.values()))
        now = time.monotonic()
        for (rank, key), value in zip(keys.items(), values, strict=True):
            if not peers.read(rank, value, now):
                barrier.doubt(key)
        peers.read_at = now
