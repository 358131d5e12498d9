"""Ranks agree on a save through the process group's store, without a collective.

A thread beside the training loop can do that. A rank may write for an hour and run into no time-out of a communication
library, as its collective would: it only has to make progress. Any program that reaches the store's port can write to
it, so values are signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from zero.errors import Parted
from zero.launch.contract import SECRET_VARIABLE, signature
from zero.log import logger
from zero.watchdog.hang_report import SAVES, cause, ranks_text
from zero.watchdog.peers import STOPPED, Peers
from zero.watchdog.rank_status import RankStatus

POLL = (0.005, 0.25)  # seconds between two looks at the store, at first and after a while
SHARE = 0.5  # seconds after which a turn makes way for this rank's record
GRACE = 5.0  # seconds more that others wait for the first rank, which first says who is missing
LINGERS = 10.0  # seconds that the first rank, with which the store may go, waits for the others to read its answer
GONE = 2.0  # the same after it has found one of them missing
SAYS = 10.0  # seconds without progress before the first line about it
AGAIN = 60.0  # seconds between two lines
ALIKE = 2.0  # seconds within which ranks have stopped together
SURE = 3.0  # seconds for which a reason to give up must last
DEAD = 20.0  # seconds without any word of a rank, which is gone then, or stopped
KINDS = {"ValueError": ValueError, "RuntimeError": RuntimeError, "OSError": OSError}
_LENGTH = len(signature(b""))


class Lost(Parted):
    """This rank alone has given up; others may not know, or may have decided otherwise."""


class StoreBarrier:
    """Rounds of JSON values among the ranks of one engine. With one rank nothing leaves the process.

    Only the thread of `StatusStore` touches the store, which blocks it if the store's process is stopped: it calls
    `set`, `get`, `doubt`, `turn` and `release`; any other thread, the rest.

    Keys belong to one engine of one group of ranks: each group counts its own engines, because a rank may be in
    several groups, with an engine in each, unknown to other ranks. Signatures of one attempt of a job are invalid in
    the next one. If the ranks have no secret, because another launcher started them, values are only known to be
    complete.

    ranks:   the global ranks of the engine;
    number:  of this engine among those of its ranks, from 1; the same on all of them once they have agreed; 0 where
             nothing is sent;
    timeout: seconds that a rank may take without any progress;
    open:    from `start` to `shut`; wake: wakes the store's thread; delay: seconds until its next turn, while `busy`.
    """

    def __init__(self, status: RankStatus, ranks: tuple[int, ...] = (), timeout: float = 600.0) -> None:
        self.ranks = ranks or (status.rank,)
        self.number = 0
        self.timeout = timeout
        self.open = False
        self.wake = threading.Event()
        self.delay = POLL[0]
        self._status = status
        self._state = threading.Condition()
        self._posted: dict[str, bytes | None] = {}  # None once written, until all ranks have read it
        self._expected: dict[str, int] = {}  # key -> the rank that writes it
        self._received: dict[str, bytes] = {}
        self._round = 0
        if len(self.ranks) == 1:
            return
        # The original store ends with the process group, and with it, on the rank that runs it, the server.
        self._original = dist.distributed_c10d._get_default_store()
        self._name = f"zero/{hashlib.blake2b(repr(sorted(ranks)).encode(), digest_size=8).hexdigest()}"
        self.store = dist.PrefixStore(self._name, self._original.clone())
        self.peers = Peers(status.rank, ranks, _keeper(self._original))
        # Of this attempt alone; torchrun's agents count restarts each for itself.
        attempt = os.environ.get("MASTER_PORT", "")
        self._secret = signature(os.environ.get(SECRET_VARIABLE, "").encode(errors="surrogateescape"), attempt.encode())
        self._doubted: set[str] = set()
        self.renumber(1)

    @property
    def rank(self) -> int:
        """This rank's place among the ranks of the engine."""
        return self.ranks.index(self._status.rank)

    @property
    def prefix(self) -> str:
        """The prefix of keys that belong only to this engine."""
        return f"{self.number}/"

    def renumber(self, number: int) -> None:
        """Take the number that the ranks have agreed on, at least this rank's own, and count on from there."""
        if number != self.number:
            self.number = self.store.add(f"engines/{self._status.rank}", number - self.number)

    def set(self, key: str, value: bytes) -> None:
        """Sign `value` and write it under `key`."""
        self.store.set(key, self._signature(key, value) + value)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of existing keys; None, and one log line, for a value that no rank of this job wrote."""
        found: list[bytes | None] = []
        for key, signed in zip(keys, self.store.multi_get(list(keys)) if keys else (), strict=True):
            sign, value = bytes(signed[:_LENGTH]), bytes(signed[_LENGTH:])
            genuine = hmac.compare_digest(sign, self._signature(key, value))
            found.append(value if genuine else None)
            if not genuine:
                self.doubt(key)
        return found

    def doubt(self, key: str) -> None:
        """Log, once, that no rank of this job wrote the value under `key`."""
        if key not in self._doubted:
            self._doubted.add(key)
            text = "rank %d leaves out '%s/%s' in the store of the process group, which somebody else has written"
            text += " who reaches its port; see docs/launching.md"
            logger.log(logging.WARNING, text, self._status.rank, self._name, key)

    def _signature(self, key: str, value: bytes) -> bytes:
        return signature(self._secret, f"{self._name}/{key}".encode(), value)

    def moved(self, nbytes: int) -> None:
        """This rank has made progress; from any thread."""
        self._status.progress += max(1, nbytes)

    def start(self) -> None:
        """Begin a save: the store is kept until `shut`, even if the process group is destroyed."""
        self.open = True

    def shut(self) -> None:
        """End what `start` began; posted values are still written. From any thread."""
        with self._state:
            self._expected, self._received, self.open = {}, {}, False
        self.wake.set()

    def settle(self, value: Any, decide: Callable[[list[Any]], Any], phase: str, in_call: bool = False) -> Any:
        """What `decide`, on the first rank, makes of every rank's `value`; the same on all ranks. Waits for all.

        An exception as a `value`, or from `decide`, is raised on all ranks, as OSError, ValueError or RuntimeError
        that names the rank. Raises RuntimeError that names rank and `phase` where a rank makes no progress for
        `timeout` seconds or is gone, and where the store is. `in_call`: all ranks are inside of one call of the
        engine, so one that has raised or ended, and does not call again within a few seconds, is not waited for.
        Between `start` and `shut`.
        """
        self._round += 1
        mine = _error_of(value) if isinstance(value, BaseException) else {"value": value}
        if len(self.ranks) == 1:
            return _result(_answer([mine], decide, self.ranks))
        prefix = f"{self.prefix}saves/{self._round}/"
        first, others = self.ranks[0], self.ranks[1:]
        if self.rank != 0:
            self._post(f"{prefix}{self._status.rank}", mine, readers=1)
            (answer,) = self._await({f"{prefix}answer": first}, phase, self.timeout + GRACE, in_call)
            return _result(answer)
        lingers = GONE
        try:
            told = self._await({f"{prefix}{rank}": rank for rank in others}, phase, self.timeout, in_call)
            answer = _answer([mine, *told], decide, self.ranks)
            lingers = LINGERS
        except BaseException as error:
            answer = _error_of(error)
            raise
        finally:
            self._post(f"{prefix}answer", answer, readers=len(others))
            with self._state:  # until all have read it, but not for ever: ranks may be gone
                self._state.wait_for(lambda: self.peers.failed or not self._posted, lingers)
        return _result(answer)

    def _post(self, key: str, value: Any, readers: int) -> None:
        """Send a JSON value, compressed at most 8 MiB; the last of `readers` removes it."""
        data = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)
        with self._state:
            self._posted[key] = f"{readers} ".encode() + data
        self._hurry()

    def _await(self, keys: Mapping[str, int], phase: str, timeout: float, in_call: bool) -> list[Any]:
        """The values under these keys, each from its rank; raises Lost that names the ranks without progress."""
        peers, rank = self.peers, self._status.rank
        with self._state:
            self._expected, self._received = dict(keys), {}
        self._hurry()
        began = logged = looked = time.monotonic()
        since = 0.0
        while True:
            with self._state:
                if self._state.wait_for(lambda: not self.waiting, 0.2):
                    return [json.loads(zlib.decompress(self._received[key])) for key in self._expected]
                lacking = [other for key, other in self._expected.items() if key not in self._received]
            now = time.monotonic()
            if now - looked > STOPPED:
                began = now
            looked = now
            quiet = {other: now - max(began, peers.moved_at.get(other, 0.0)) for other in lacking}
            silent = max(quiet.values())
            missing = [other for other, seconds in quiet.items() if silent - seconds <= ALIKE]
            who = f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'}"
            if peers.failed:
                raise Lost(
                    f"rank {rank}, {phase}: the store of the process group is gone ({peers.failed}), and rank 0 "
                    "with it, unless a launcher keeps it"
                )
            why = cause(peers.view(), sys.maxsize, SAVES) if in_call and peers.read_at > began else ""
            since = (since or now) if why else 0.0
            if not why or now - since <= SURE:
                why = self._gone(quiet)
            if why:
                raise Lost(f"rank {rank}, {phase}, waits for {ranks_text(missing)} in vain: {why}")
            if silent > timeout:
                raise Lost(
                    f"rank {rank}, {phase}: {who} made no progress for {silent:.0f} s, the time-out (zero.timeout)"
                )
            if (unanswered := min(peers.unanswered, now - began)) > timeout:
                raise Lost(
                    f"rank {rank}, {phase}: the store of the process group has not answered for "
                    f"{unanswered:.0f} s (zero.timeout); rank 0 is stopped or out of reach"
                )
            if silent > SAYS and now - logged > SAYS:
                logged = now + AGAIN - SAYS
                text = f"rank {rank}, {phase}: {who} made no progress for {silent:.0f} s"
                logger.log(logging.WARNING, "%s%s", text, f"; perhaps {SAVES}" if in_call else "")

    def _gone(self, ranks: Iterable[int]) -> str:
        """Which of these have ended without a word, or are stopped; "" if none has.

        Where a collective has failed on this rank, somebody is gone, and a short silence tells who.
        """
        view = self.peers.view()
        limit = view.silence if self._status.gave_up else DEAD
        gone = [rank for rank in ranks if rank in view.others and view.others[rank].silent > limit]
        return f"{ranks_text(gone)} gone: not heard of for more than {limit:.0f} s" if gone else ""

    @property
    def waiting(self) -> bool:
        """Whether an expected value is missing."""
        return len(self._received) < len(self._expected)

    @property
    def busy(self) -> bool:
        """Whether there is anything to look for in the store."""
        return bool(self._posted or self.waiting)

    def turn(self, each: bool) -> None:
        """Write posted values, and read arrived ones; `each`: check every key, not only all at once."""
        end = time.monotonic() + SHARE
        with self._state:
            posted = self._posted.copy()
        for key, data in posted.items():
            if data is not None:
                self.set(key, data)
                self._posted[key] = None
        missing = [key for key in self._expected if key not in self._received]
        complete = bool(missing) and self.store.check(missing)
        for key in missing if complete or each else ():
            if (complete or self.store.check([key])) and (data := self._take(key)) is not None:
                with self._state:
                    self._received[key] = data
            if time.monotonic() > end:
                break
        read = [key for key, data in posted.items() if not (self.open and self.store.check([key]))]
        with self._state:
            for key in read:
                del self._posted[key]
            self._state.notify_all()
        self.delay = min(1.2 * self.delay, POLL[1])

    def release(self) -> None:
        """Release the store; if this process runs it, it may end now."""
        del self.store, self._original
        with self._state:
            self._state.notify_all()

    def _hurry(self) -> None:
        self.delay = POLL[0]
        self.wake.set()

    def _take(self, key: str) -> bytes | None:
        """Read a value; None if no rank of this job has written it."""
        (value,) = self.get([key])
        if value is None:
            return None
        readers, data = value.split(b" ", 1)
        if self.store.add(f"{key}/read", 1) == int(readers):
            self.store.delete_key(f"{key}/read")
            self.store.delete_key(key)
        return data


def _answer(
    values: Sequence[dict[str, Any]], decide: Callable[[list[Any]], Any], ranks: Sequence[int]
) -> dict[str, Any]:
    """What to tell all ranks; errors of some as one, which names the ranks unless all have the same."""
    texts: dict[str, list[int]] = {}
    wrong = [(rank, one) for rank, one in zip(ranks, values, strict=True) if "error" in one]
    for rank, one in wrong:
        texts.setdefault(one["error"], []).append(rank)
    if len(texts) == 1 and len(wrong) == len(values):
        return wrong[0][1]
    if wrong:
        return wrong[0][1] | {"error": "; ".join(f"{ranks_text(those)}: {text}" for text, those in texts.items())}
    try:
        return {"value": decide([one["value"] for one in values])}
    except (OSError, ValueError, RuntimeError) as error:
        problem = _error_of(error)
        there = f"rank {ranks[0]}: " if isinstance(error, OSError) and len(values) > 1 else ""
        return problem | {"error": there + problem["error"]}


def _error_of(error: BaseException) -> dict[str, Any]:
    """An exception as JSON."""
    if isinstance(error, OSError):
        text = str(error.strerror or error)
        for name in (error.filename, error.filename2):
            text += f": '{name}'" if name else ""
        return {"error": text, "kind": "OSError", "errno": error.errno}
    kind = next((name for name, known in KINDS.items() if isinstance(error, known)), "RuntimeError")
    plain = type(error) in (*KINDS.values(), Lost)
    return {"error": str(error) if plain else f"{type(error).__name__}: {error}", "kind": kind}


def _result(answer: dict[str, Any]) -> Any:
    if "error" not in answer:
        return answer["value"]
    if answer["kind"] == "OSError" and answer.get("errno") is not None:
        raise OSError(answer["errno"], answer["error"])
    raise KINDS[answer["kind"]](answer["error"])


def _keeper(store: dist.Store) -> int | None:
    """The rank whose process runs the store: 0, as torch makes it, unless a launcher or a file does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not launched else None
