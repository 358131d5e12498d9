"""Values that ranks of one engine send each other through the store, without a collective."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from zero.watchdog.signed_store import SignedStore

POLL = (0.005, 0.25)  # seconds between two looks at the store, at first and after a while
SHARE = 0.5  # seconds after which a turn makes way for this rank's record


class Messages:
    """The values that this rank sends and waits for. The store's thread calls `turn`, any other thread the rest.

    open: between the begin and the end of a use; `wake` makes the store's thread call `turn` soon.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.open = False
        self.delay = POLL[0]  # seconds until the next turn, while `busy`
        self._wake = wake
        self._state = threading.Condition()
        self._posted: dict[str, bytes] = {}
        self._unread: list[str] = []  # keys that some ranks have not read
        self._expected: dict[str, int] = {}  # key -> the rank that writes it
        self._received: dict[str, bytes] = {}

    def post(self, key: str, value: Any, readers: int = 1) -> None:
        """Send a JSON value, compressed at most 8 MiB; the last of `readers` removes it."""
        data = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)
        with self._state:
            self._posted[key] = f"{readers} ".encode() + data
        self._hurry()

    def expect(self, keys: Mapping[str, int]) -> None:
        """Expect these keys from now on, each from its rank."""
        with self._state:
            self._expected, self._received = dict(keys), {}
        self._hurry()

    def wait(self, seconds: float) -> list[Any] | None:
        """The expected values, once all have arrived; None after `seconds`."""
        with self._state:
            if not self._state.wait_for(lambda: not self.waiting, seconds):
                return None
            return [json.loads(zlib.decompress(self._received[key])) for key in self._expected]

    def flush(self, seconds: float, failed: Callable[[], object]) -> None:
        """Wait until all ranks have read the posted values, but not for ever: ranks may be gone."""
        with self._state:
            self._state.wait_for(lambda: failed() or not (self._posted or self._unread), seconds)

    def close(self) -> None:
        """Stop waiting; posted values are still written."""
        with self._state:
            self._expected, self._received, self.open = {}, {}, False
        self._wake()

    def missing(self) -> list[int]:
        """The ranks whose message is missing."""
        with self._state:
            return [rank for key, rank in self._expected.items() if key not in self._received]

    @property
    def waiting(self) -> bool:
        """Whether an expected value is missing."""
        return len(self._received) < len(self._expected)

    @property
    def busy(self) -> bool:
        """Whether there is anything to look for in the store."""
        return bool(self._posted or self._unread or self.waiting)

    def turn(self, store: SignedStore, each: bool) -> None:
        """Write posted values, and read arrived ones; `each`: check every key, not only all at once."""
        end = time.monotonic() + SHARE
        while self._posted:
            key = next(iter(self._posted))
            store.set(key, self._posted[key])
            with self._state:
                del self._posted[key]
                self._unread.append(key)
        missing = [key for key in self._expected if key not in self._received]
        complete = bool(missing) and store.has(missing)
        for key in missing if complete or each else ():
            if (complete or store.has([key])) and (data := self._take(store, key)) is not None:
                with self._state:
                    self._received[key] = data
            if time.monotonic() > end:
                break
        self._unread = [key for key in self._unread if self.open and store.has([key])]
        self.delay = min(1.2 * self.delay, POLL[1])
        self.notify()

    def notify(self) -> None:
        """Wake the waiting threads."""
        with self._state:
            self._state.notify_all()

    def _hurry(self) -> None:
        self.delay = POLL[0]
        self._wake()

    def _take(self, store: SignedStore, key: str) -> bytes | None:
        """Read a value; None if no rank of this job has written it."""
        (value,) = store.get([key])
        if value is None:
            return None
        readers, data = value.split(b" ", 1)
        if store.add(f"{key}/read", 1) == int(readers):
            store.delete(f"{key}/read")
            store.delete(key)
        return data
