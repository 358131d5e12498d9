"""Watches this rank's waits from a separate thread: logs the long ones, and ends the hopeless ones."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zero.log import logger
from zero.watchdog import hang_report as report
from zero.watchdog.device_waits import DeviceWaits
from zero.watchdog.peers import STOPPED
from zero.watchdog.rank_status import Collective, FailedWait, RankStatus, Waiting
from zero.watchdog.status_store import StatusStore

TICK = 0.4  # seconds between two looks
SAYS = 4.0  # seconds of a wait before the first line, which thus appears within 5
AGAIN = 60.0  # seconds between two lines
READS = 0.3  # seconds of a wait before the other ranks' records are read
SURE = 1.0  # seconds of a wait before another rank's exception ends it
STUCK = 2.0  # seconds for which ranks that wait for each other must have said the same
LEAVES = 10.0  # seconds for a thread to leave an ended wait
EXPLAINS = 6.0  # maximal seconds to explain a failed wait
TOLD = 0.2  # seconds after which a record has reached the store
LINGERS = 1.0  # seconds after which other ranks have read it
OUTLIVES = 3.0  # seconds that the store stays after a failed program, for ranks on busy machines
NEAR = 1.0  # a wait lost this close to its time-out ended because of it, perhaps that of another rank
TAG = (1 << 30) + 1  # of a message that no rank sends


class HangDetector(threading.Thread):
    """One per engine, over all its groups; see `Watchdog.start`."""

    def __init__(
        self,
        status: RankStatus,
        store: StatusStore,
        groups: Sequence[weakref.ref[dist.ProcessGroup]],
        timeout: float,
        device: DeviceWaits | None,
    ) -> None:
        super().__init__(name="zero-hang-detector", daemon=True)
        self.explained = threading.Event()  # `status.gave_up` is set
        self._status = status
        self._store = store
        self._peers = store.peers
        self._groups = groups
        self._world = weakref.ref(dist.group.WORLD)
        self._timeout = timeout
        self._device = device
        self._said: Waiting | None = None  # the wait that the last line was about
        self._next = 0.0  # time.monotonic() of the next line about it
        self._answers = 0.0  # time.monotonic() of the next answer to ranks that wait for this one
        self._asks = 0  # the store's asks already answered
        self._stuck: tuple[dict[int, float], float] = ({}, 0.0)  # ranks that wait for each other; since when
        self._resumed = 0.0  # time.monotonic() at which this process continued after it was stopped
        self._wake = threading.Event()
        self._ended = False

    def poke(self) -> None:
        """Look at the waits now."""
        self._wake.set()

    def end(self) -> None:
        """Stop."""
        self._ended = True
        self._wake.set()

    def run(self) -> None:
        """Run until the end, or until the process group is gone."""
        looked = time.monotonic()
        while not self._ended and dist.is_initialized() and dist.group.WORLD is self._world():
            now = time.monotonic()
            if now - looked > STOPPED:
                self._resumed = now
            looked = now
            try:
                self._look(now)
            except Exception:
                # Training continues without the detector, so log that it is gone.
                logger.exception("rank %d: the watchdog over waiting ranks has ended", self._status.rank)
                return
            self._wake.wait(TICK if self._status.failed_wait is None else TICK / 4)
            self._wake.clear()

    def _look(self, now: float) -> None:
        status, failed, waiting = self._status, self._status.failed_wait, self._waiting()
        if status.gave_up:
            # The connections are closed or useless; any wait now is part of the exit.
            if waiting is not None and now - waiting.since > SURE:
                self._end_wait(waiting)
        elif failed is not None:
            self._store.reading = True
            self._store.poke()
            self._explain(failed, now)
        elif waiting is None:
            self._answer(now)
        else:
            age = now - max(waiting.since, self._resumed)
            self._store.reading = age > READS
            view = self._peers.view()
            why = report.cause(view, waiting.collective.number) if age > SURE else ""
            status.look(waiting, view)
            if not why and self._hopeless(view, now):
                who = f"{report.ranks_text(self._stuck[0])} wait for each other, and nothing can come"
                why = f"{report.blame(view, status.record(0, 0), self._stuck[0])}; {who}"
                self._give_up(waiting, f"{why}; {self._subject(waiting, age)}; {self._there(view, waiting)}")
            elif why:
                self._give_up(waiting, f"{why}; {self._subject(waiting, age)}")
            elif age >= self._timeout:
                text = f"{self._subject(waiting, age)}, the time-out (zero.timeout)"
                self._give_up(waiting, f"{text}; {self._there(view, waiting)}")
            elif age >= SAYS:
                self._say(waiting, age, now)

    def _hopeless(self, view: report.View, now: float) -> bool:
        """Whether ranks have waited for each other, this one among them, in all that they said for a while."""
        stuck, (before, since) = report.deadlock(view, self._status.record(0, 0)), self._stuck
        self._stuck = (stuck, since if stuck == before else now)
        fresh = all(seen.silent < view.silence for rank, seen in view.others.items() if rank in stuck)
        return bool(stuck) and fresh and now - self._stuck[1] > STUCK

    @staticmethod
    def _there(view: report.View, waiting: Waiting) -> str:
        return report.hang_report(view, waiting.collective.text)

    def _waiting(self) -> Waiting | None:
        if self._device is not None:
            self._status.waiting = self._device.look()
        return self._status.waiting

    def _subject(self, waiting: Waiting, age: float) -> str:
        status = self._status
        within = f" in {status.phase.value}" if status.phase.value != "outside" else ""
        return f"rank {status.rank} has waited for the {waiting.collective} for {age:.1f} s{within}"

    def _say(self, waiting: Waiting, age: float, now: float) -> None:
        """Log a line about a long wait, and repeat it at intervals."""
        if waiting is self._said and now < self._next:
            return
        self._said, self._next = waiting, now + AGAIN
        self._store.ask()
        there = self._there(self._peers.view(), waiting)
        logger.log(logging.WARNING, "%s; %s", self._subject(waiting, age), there)

    def _answer(self, now: float) -> None:
        """Log where this rank is, if it does not wait but others may wait for it."""
        store, status = self._store, self._status
        if store.asks == self._asks or now < self._answers:
            store.reading = False
            return
        store.reading = True
        if now - self._peers.read_at > self._peers.silence:
            return  # the next look may find something
        self._asks, self._answers = store.asks, now + AGAIN
        waiting = [seen.record for seen in self._peers.view().others.values() if seen.record.seconds >= SAYS - 1]
        if waiting:
            logger.log(
                logging.WARNING,
                "rank %d is waited for by %s (%s); rank %d: %s",
                status.rank,
                report.ranks_text(record.rank for record in waiting),
                f"{waiting[0].waits}, #{waiting[0].wait}",
                status.rank,
                report.where(status.record(0, int(status.failing))),
            )

    def _explain(self, failed: FailedWait, now: float) -> None:
        """Find out why a wait failed, and release its thread."""
        view, seconds = self._peers.view(), now - failed.at
        collective, age = failed.waiting.collective, failed.at - failed.waiting.since
        why = report.cause_of_loss(view, seconds) if view.others or seconds > view.silence else ""
        if not why:
            return
        text = f"{why}; rank {self._status.rank} waited for the {collective} for {age:.1f} s"
        if age >= self._timeout - NEAR:
            text += f", the time-out (zero.timeout); {report.hang_report(view, collective.text)}"
        elif why == report.UNKNOWN:
            # Such as the process group's own time-out, if it is shorter than ours.
            text += f"; {report.hang_report(view, collective.text)}; {report.clipped(failed.error)}"
        self._judge(text, collective)

    def _judge(self, text: str, collective: Collective) -> None:
        status, missing = self._status, report.wanted(self._peers.view(), collective.text)
        text = f"{status.own_error()}{text}"
        status.missing, status.gave_up, status.error, status.failing = missing, text, text, True
        self._store.poke()
        # Other ranks must read the reason before a connection closes, and before the store ends with this process.
        time.sleep(LINGERS if self._peers.keeps else TOLD)
        self.explained.set()

    def _give_up(self, waiting: Waiting, text: str) -> None:
        status = self._status
        error, failing = status.error, status.failing
        self._judge(text, waiting.collective)
        if self._waiting() is not waiting and status.failed_wait is None:
            # The wait has just ended successfully.
            status.error, status.failing, status.gave_up, status.missing = error, failing, "", ()
            self.explained.clear()
        else:
            self._end_wait(waiting)

    def _end_wait(self, waiting: Waiting) -> None:
        """Make the waiting thread leave this wait, or end the process."""
        end = time.monotonic() + LEAVES
        if self._device is not None:  # from another thread, because this may hang, too
            threading.Thread(target=self._abort, name="zero-abort", daemon=True).start()
        while self._waiting() is waiting:
            if time.monotonic() > end:
                logger.error("%s; the process ends, for the wait cannot be ended", self._status.gave_up)
                sys.stderr.flush()
                os._exit(1)
            if self._device is None:
                self._interrupt()
            time.sleep(0.1)

    def _abort(self) -> None:
        """Make NCCL abort the work of these groups, so that the device's streams and their waiters continue."""
        for group in filter(None, (ref() for ref in self._groups)):
            group.abort()

    def _interrupt(self) -> None:
        """Close the connections of this process, which ends any wait of another thread.

        gloo does so when any wait times out, so this waits for a message that no rank sends.
        """
        for group in filter(None, (ref() for ref in self._groups)):
            for peer in range(dist.get_world_size(group)):
                if peer != dist.get_rank(group):
                    # This error is expected, or the connection to this peer is closed already.
                    with contextlib.suppress(RuntimeError):
                        work = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=TAG)
                        work.wait(datetime.timedelta(milliseconds=1))
