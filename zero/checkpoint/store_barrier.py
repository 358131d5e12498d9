"""Ranks agree on a save through the process group's store, without a collective.

A thread beside the training loop can do that. A rank may write for an hour and run into no time-out of a communication
library, as its collective would: it only has to make progress.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zero.errors import Parted
from zero.log import logger
from zero.watchdog.hang_report import SAVES, cause, ranks_text
from zero.watchdog.status_store import STOPPED
from zero.watchdog.watchdog import Watchdog

GRACE = 5.0  # seconds more that others wait for the first rank, which first says who is missing
LINGERS = 10.0  # seconds that the first rank, with which the store may go, waits for the others to read its answer
GONE = 2.0  # the same after it has found one of them missing
SAYS = 10.0  # seconds without progress before the first line about it
AGAIN = 60.0  # seconds between two lines
ALIKE = 2.0  # seconds within which ranks have stopped together
SURE = 3.0  # seconds for which a reason to give up must last
DEAD = 20.0  # seconds without any word of a rank, which is gone then, or stopped
KINDS = {"ValueError": ValueError, "RuntimeError": RuntimeError, "OSError": OSError}


class Lost(Parted):
    """This rank alone has given up; others may not know, or may have decided otherwise."""


class StoreBarrier:
    """Rounds of JSON values among the ranks of one engine. With one rank nothing leaves the process.

    rank:    this one's place among the `world_size` ranks of the engine; `ranks`: their global numbers, for messages;
    timeout: seconds that a rank may take without any progress.
    """

    def __init__(self, watchdog: Watchdog, timeout: float = 600.0) -> None:
        self._status = watchdog.status
        self._store = watchdog.store
        self.ranks = (watchdog.status.rank,) if watchdog.store is None else watchdog.store.ranks
        self.rank = self.ranks.index(watchdog.status.rank)
        self.world_size = len(self.ranks)
        self.timeout = timeout
        self._round = 0

    def moved(self, nbytes: int) -> None:
        """This rank has made progress; from any thread."""
        self._status.progress += max(1, nbytes)

    def start(self) -> None:
        """Begin a save: the store is kept until `shut`, even if the process group is destroyed."""
        if self._store is not None:
            self._store.messages.open = True

    def shut(self) -> None:
        """End what `start` began; from any thread."""
        if self._store is not None:
            self._store.messages.close()

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
        if self.world_size == 1:
            return _result(_answer([mine], decide, self.ranks))
        messages, prefix = self._store.messages, f"{self._store.prefix}saves/{self._round}/"
        first, others = self.ranks[0], self.ranks[1:]
        if self.rank != 0:
            messages.post(f"{prefix}{self.ranks[self.rank]}", mine)
            messages.expect({f"{prefix}answer": first})
            (answer,) = self._await(phase, self.timeout + GRACE, in_call)
            return _result(answer)
        messages.expect({f"{prefix}{rank}": rank for rank in others})
        lingers = GONE
        try:
            answer = _answer([mine, *self._await(phase, self.timeout, in_call)], decide, self.ranks)
            lingers = LINGERS
        except BaseException as error:
            answer = _error_of(error)
            raise
        finally:
            messages.post(f"{prefix}answer", answer, readers=len(others))
            messages.flush(lingers, lambda: self._store.failed)
        return _result(answer)

    def _await(self, phase: str, timeout: float, in_call: bool) -> list[Any]:
        """The values that are expected; raises RuntimeError that names the ranks without progress."""
        store, rank = self._store, self.ranks[self.rank]
        began = logged = looked = time.monotonic()
        since = 0.0
        while (received := store.messages.wait(0.2)) is None:
            now = time.monotonic()
            if now - looked > STOPPED:
                began = now
            looked = now
            moved_at = store.records.moved_at
            quiet = {other: now - max(began, moved_at.get(other, 0.0)) for other in store.messages.missing()}
            silent = max(quiet.values(), default=0.0)
            missing = [other for other, seconds in quiet.items() if silent - seconds <= ALIKE]
            if not missing:
                continue
            who = f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'}"
            if store.failed:
                raise Lost(
                    f"rank {rank}, {phase}: the store of the process group is gone ({store.failed}), and rank 0 "
                    "with it, unless a launcher keeps it"
                )
            why = cause(store.view(), sys.maxsize, SAVES) if in_call and store.records.read_at > began else ""
            since = (since or now) if why else 0.0
            if not why or now - since <= SURE:
                why = self._gone(quiet)
            if why:
                raise Lost(f"rank {rank}, {phase}, waits for {ranks_text(missing)} in vain: {why}")
            if silent > timeout:
                raise Lost(
                    f"rank {rank}, {phase}: {who} made no progress for {silent:.0f} s, the time-out (zero.timeout)"
                )
            if (unanswered := min(store.unanswered, now - began)) > timeout:
                raise Lost(
                    f"rank {rank}, {phase}: the store of the process group has not answered for "
                    f"{unanswered:.0f} s (zero.timeout); rank 0 is stopped or out of reach"
                )
            if silent > SAYS and now - logged > SAYS:
                logged = now + AGAIN - SAYS
                text = f"rank {rank}, {phase}: {who} made no progress for {silent:.0f} s"
                logger.log(logging.WARNING, "%s%s", text, f"; perhaps {SAVES}" if in_call else "")
        return received

    def _gone(self, ranks: Iterable[int]) -> str:
        """Which of these have ended without a word, or are stopped; "" if none has.

        Where a collective has failed on this rank, somebody is gone, and a short silence tells who.
        """
        view = self._store.view()
        limit = view.silence if self._status.gave_up else DEAD
        gone = [rank for rank in ranks if rank in view.others and view.others[rank].silent > limit]
        return f"{ranks_text(gone)} gone: not heard of for more than {limit:.0f} s" if gone else ""


def _answer(
    values: Sequence[dict[str, Any]], decide: Callable[[list[Any]], Any], ranks: Sequence[int]
) -> dict[str, Any]:
    """What to tell all ranks."""
    wrong = {rank: one for rank, one in zip(ranks, values, strict=True) if "error" in one}
    if wrong:
        return _merged(wrong, len(values))
    try:
        return {"value": decide([one["value"] for one in values])}
    except (OSError, ValueError, RuntimeError) as error:
        problem = _error_of(error)
        there = f"rank {ranks[0]}: " if isinstance(error, OSError) and len(values) > 1 else ""
        return problem | {"error": there + problem["error"]}


def _merged(wrong: dict[int, dict[str, Any]], world_size: int) -> dict[str, Any]:
    """The errors of some ranks as one, which names them unless all have the same."""
    texts: dict[str, list[int]] = {}
    for rank, one in wrong.items():
        texts.setdefault(one["error"], []).append(rank)
    first = next(iter(wrong.values()))
    if len(texts) == 1 and len(wrong) == world_size:
        return first
    return first | {"error": "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in texts.items())}


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
