"""Carries values between the ranks of a save, in a thread of its own, as a store that does not answer blocks one."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from zero.watchdog.signed import Signed

POLL = (0.005, 0.25)  # seconds between two looks at the store, at first and after a while
PERIOD = 1.0  # seconds between two words about progress
STOPPED = 10.0  # seconds between two looks from which on this process, or the store, was stopped
LARGEST = 4 << 20  # bytes of one value; the store takes 8 MiB
LEAVES = 1.0  # seconds that the thread has to end


class Message(NamedTuple):
    """A value to put down under a key; `readers`: how many will read it, the last of whom takes it away."""

    key: str
    value: Any
    readers: int = 1


class BarrierThread(threading.Thread):
    """Puts down what is posted, brings what is expected, and tells and watches progress in between.

    failed: why the store cannot be used any more, or "".
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, world_size: int, progress: Callable[[], int]) -> None:
        super().__init__(name="zero-thread", daemon=True)
        self.failed = ""
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._progress = progress
        self._signed = Signed(rank)
        self._state = threading.Condition()
        self._posts: list[Message] = []
        self._unread: list[str] = []  # counters of what was posted and not read by all
        self._expected: dict[str, int] = {}  # key -> the rank that puts it down
        self._found: dict[str, Any] | None = None
        self._seen: dict[int, tuple[Any, float]] = {}  # progress of ranks, and when it changed
        self._told = self._looked = self._answered = time.monotonic()
        self._ended = False

    def post(self, message: Message) -> None:
        """Put this down as soon as possible."""
        with self._state:
            self._posts.append(message)
            self._state.notify_all()

    def expect(self, keys: Sequence[str], ranks: Sequence[int]) -> None:
        """Look for these from now on, `keys[i]` from `ranks[i]`."""
        now = time.monotonic()
        with self._state:
            self._expected = dict(zip(keys, ranks, strict=True))
            self._found = {}
            self._seen = dict.fromkeys(ranks, (None, now))
            self._answered = now
            self._state.notify_all()

    def wait(self, seconds: float) -> list[Any] | None:
        """What was expected, once all of it is there; None after so many seconds, and after a failure."""
        with self._state:
            self._state.wait_for(lambda: self.failed or self._complete(), seconds)
            return [self._found[key] for key in self._expected] if self._complete() else None

    def flushed(self, seconds: float) -> None:
        """Wait until all have read what was posted; not for ever, as they may be gone."""
        with self._state:
            self._state.wait_for(lambda: self.failed or not (self._posts or self._unread), seconds)

    def missing(self, now: float) -> tuple[list[int], float]:
        """The ranks whose word is missing and that made no progress longest, and for how many seconds."""
        with self._state:
            since = {rank: self._seen[rank][1] for key, rank in self._expected.items() if key not in self._found}
        oldest = min(since.values(), default=now)
        return [rank for rank, at in since.items() if at - oldest <= 2 * PERIOD], now - oldest

    def unanswered(self, now: float) -> float:
        """Seconds for which the store has not answered."""
        return now - self._answered

    def end(self) -> None:
        """Stop, once everything posted is put down."""
        with self._state:
            self._ended = True
            self._state.notify_all()
        self.join(LEAVES)

    def run(self) -> None:
        """Until the end, or until the store is gone."""
        delay = POLL[0]
        try:
            while True:
                with self._state:
                    busy = self._posts or self._unread or not self._complete()
                    if self._ended and not self._posts:
                        break
                    if not busy:
                        self._state.wait(PERIOD)
                        delay = POLL[0]
                self._turn()
                with self._state:
                    self._state.notify_all()
                    if not self._posts and not self._ended:
                        self._state.wait(delay)
                        delay = min(1.2 * delay, POLL[1])
            self._store.delete_key(self._key(f"progress/{self._rank}"))
        except Exception as error:  # of whatever kind the store raises
            with self._state:
                self.failed = str(error).strip().partition("\n")[0] or type(error).__name__
                self._state.notify_all()

    def _complete(self) -> bool:
        return self._found is not None and len(self._found) == len(self._expected)

    def _turn(self) -> None:
        now = time.monotonic()
        while self._posts:
            self._put(self._posts[0])
            with self._state:
                self._posts.pop(0)
        # A gap in our own looks says nothing about the others: they count from when we look again.
        fresh = now - self._looked > STOPPED
        slow = now - self._told > PERIOD
        if slow or fresh:
            self._told = now
            self._set(self._key(f"progress/{self._rank}"), self._moves().encode())
        self._collect(now, slow, fresh)
        for counter in list(self._unread):
            if not self._store.check([counter]):
                self._unread.remove(counter)
        self._looked = self._answered = time.monotonic()

    def _collect(self, now: float, slow: bool, fresh: bool) -> None:
        """Bring what has come of the expected values; see every so often whether those who owe one get on."""
        pending = {key: rank for key, rank in self._expected.items() if key not in self._found}
        if not pending:
            return
        if self._store.check([self._key(key) for key in pending]):
            for key in pending:
                self._take(key)
            return
        for key, rank in pending.items() if slow or fresh else ():
            if self._store.check([self._key(key)]):
                self._take(key)
                continue
            place = self._key(f"progress/{rank}")
            before, since = self._seen[rank]
            moves = (self._get(place) if self._store.check([place]) else None) or before
            self._seen[rank] = (moves, now if fresh or moves != before else since)

    def _moves(self) -> str:
        """This rank's progress; of rank 0 also that of those for whom it waits, since all wait for rank 0."""
        return f"{self._progress()} {[moves for moves, _ in self._seen.values()] if self._rank == 0 else ''}"

    def _put(self, message: Message) -> None:
        data = zlib.compress(json.dumps(message.value, separators=(",", ":")).encode(), 1)
        parts = [data[at : at + LARGEST] for at in range(0, len(data), LARGEST)]
        key = self._key(message.key)
        if message.readers > 1:
            self._store.set(f"{key}/unread", str(message.readers))
            self._unread.append(f"{key}/unread")
        for index, part in enumerate(parts[1:], 1):
            self._set(f"{key}/{index}", part)
        self._set(key, f"{len(parts)} {message.readers} ".encode() + parts[0])  # last: who sees it reads the others

    def _take(self, key: str) -> None:
        """Read a value; who reads it last takes it away. What no rank has put down is as if it were not there."""
        place = self._key(key)
        if (first := self._get(place)) is None:
            return
        count, readers, data = first.split(b" ", 2)
        keys = [place, *(f"{place}/{index}" for index in range(1, int(count)))]
        parts = [data, *map(self._get, keys[1:])]
        if any(part is None for part in parts):
            return
        value = json.loads(zlib.decompress(b"".join(parts)))
        if int(readers) == 1 or self._store.add(f"{place}/unread", -1) == 0:
            for each in keys:
                self._store.delete_key(each)
            if int(readers) > 1:
                self._store.delete_key(f"{place}/unread")
        with self._state:
            self._found[key] = value

    def _set(self, place: str, value: bytes) -> None:
        self._store.set(place, self._signed.sign(place, value))

    def _get(self, place: str) -> bytes | None:
        return self._signed.read(place, bytes(self._store.get(place)))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
