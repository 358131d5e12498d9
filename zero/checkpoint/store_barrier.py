"""What ranks agree on about a save, through the process group's store and without a collective.

So a thread beside the training loop can do it, and a rank that writes for an hour runs into no time-out of a
communication library: what counts is whether it gets on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from zero.checkpoint.barrier_thread import BarrierThread, Message
from zero.log import logger
from zero.watchdog.hang_report import ranks_text

GRACE = 5.0  # seconds more that others wait for rank 0, which waits as long for them before it says who is missing
LINGERS = 10.0  # seconds that rank 0, with which the store may go, waits for the others to have read its answer
GONE = 2.0  # the same where it has found that one of them does not come
SAYS = 10.0  # seconds without progress before the first line about it
AGAIN = 60.0  # seconds between two lines
SURE = 3.0  # seconds for which there must be a reason to give up
KINDS = {"ValueError": ValueError, "RuntimeError": RuntimeError, "OSError": OSError}


def nothing_known() -> str:
    """For a caller that cannot tell whether waiting is in vain."""
    return ""


class Lost(RuntimeError):
    """What this rank has found out by itself: others may not know, or may have decided otherwise."""


class StoreBarrier:
    """Rounds of values (whatever JSON holds) among the ranks of one engine. Of one rank nothing leaves the process.

    prefix:   of the keys in the store that are this engine's;
    timeout:  seconds that a rank may take without any progress.
    progress: what this rank has got done, in bytes; others see it about once a second while they wait for this rank.
    """

    def __init__(self, rank: int, world_size: int, prefix: str, timeout: float = 600.0) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.progress = 0
        self._round = 0
        self._thread: BarrierThread | None = None
        if world_size > 1:
            # The original goes when the group does, and with it, on rank 0, the server.
            self._kept = dist.distributed_c10d._get_default_store()
            self._store = self._kept.clone() if hasattr(self._kept, "clone") else self._kept
            self._prefix = f"{prefix}saves"

    def moved(self, nbytes: int) -> None:
        """This rank has got on; from any thread."""
        self.progress += max(1, nbytes)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Around the rounds of one save: the time in between counts as work, in which the others look for progress."""
        if self._thread is not None:
            yield
            return
        self.start()
        try:
            yield
        finally:
            self.shut()

    def start(self) -> None:
        """Begin what `open` does; `shut`, in whatever thread, ends it."""
        if self.world_size > 1:
            self._thread = BarrierThread(self._store, self._prefix, self.rank, self.world_size, lambda: self.progress)
            self._thread.start()

    def shut(self) -> None:
        """End what `start` began."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()

    def settle(
        self,
        value: Any,
        decide: Callable[[list[Any]], Any],
        phase: str,
        in_vain: Callable[[], str] = nothing_known,
    ) -> Any:
        """What `decide`, on rank 0, makes of every rank's `value`; the same on all ranks. Waits for all.

        An exception as a `value`, or from `decide`, is raised on all ranks, as OSError, ValueError or RuntimeError
        that names the rank. Raises RuntimeError that names rank and `phase` where a rank makes no progress for
        `timeout` seconds, where the store is gone, and where `in_vain` has said why for a few seconds.
        """
        self._round += 1
        mine = _error_of(value) if isinstance(value, BaseException) else {"value": value}
        if self.world_size == 1:
            return _result(_answer([mine], decide))
        with self.open():
            return self._settle(mine, decide, phase, in_vain)

    def _settle(
        self, mine: dict[str, Any], decide: Callable[[list[Any]], Any], phase: str, in_vain: Callable[[], str]
    ) -> Any:
        thread, number = self._thread, self._round
        if self.rank != 0:
            thread.post(Message(f"{number}/{self.rank}", mine))
            thread.expect([f"{number}/answer"], [0])
            (found,) = self._await(thread, phase, self.timeout + GRACE, in_vain)
            return _result(found)
        keys = [f"{number}/{rank}" for rank in range(1, self.world_size)]
        thread.expect(keys, list(range(1, self.world_size)))
        try:
            answer = _answer([mine, *self._await(thread, phase, self.timeout, in_vain)], decide)
        except BaseException as error:
            thread.post(Message(f"{number}/answer", _error_of(error), readers=self.world_size - 1))
            thread.flushed(GONE)
            raise
        thread.post(Message(f"{number}/answer", answer, readers=self.world_size - 1))
        thread.flushed(LINGERS)
        return _result(answer)

    def _await(self, thread: BarrierThread, phase: str, timeout: float, in_vain: Callable[[], str]) -> list[Any]:
        """The values that the thread expects; raises RuntimeError that says who does not get on."""
        said, since = time.monotonic(), 0.0
        while True:
            found = thread.wait(0.2)
            if found is not None:
                return found
            now = time.monotonic()
            missing, silent = thread.missing(now)
            who = f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'}"
            if thread.failed:
                raise Lost(
                    f"rank {self.rank}, {phase}: the store of the process group is gone ({thread.failed}), and rank 0 "
                    "with it, unless a launcher keeps it"
                )
            why = in_vain()
            since = (since or now) if why else 0.0
            if why and now - since > SURE:
                raise Lost(f"rank {self.rank}, {phase}, waits for {ranks_text(missing)} in vain: {why}")
            if silent > timeout:
                raise Lost(
                    f"rank {self.rank}, {phase}: {who} made no progress for {silent:.0f} s, the time-out (zero.timeout)"
                )
            if thread.unanswered(now) > timeout:
                raise Lost(
                    f"rank {self.rank}, {phase}: the store of the process group has not answered for "
                    f"{thread.unanswered(now):.0f} s (zero.timeout); rank 0 is stopped or out of reach"
                )
            if silent > SAYS and now - said > SAYS:
                said = now + AGAIN - SAYS
                logger.log(
                    logging.WARNING, "rank %d, %s: %s made no progress for %.0f s", self.rank, phase, who, silent
                )


def _answer(said: Sequence[dict[str, Any]], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """What to tell all ranks."""
    wrong = {rank: one for rank, one in enumerate(said) if "error" in one}
    if wrong:
        return _merged(wrong, len(said))
    try:
        return {"value": decide([one["value"] for one in said])}
    except (OSError, ValueError, RuntimeError) as error:
        found = _error_of(error)
        there = "rank 0: " if isinstance(error, OSError) and len(said) > 1 else ""
        return found | {"error": there + found["error"]}


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


def _result(found: dict[str, Any]) -> Any:
    if "error" not in found:
        return found["value"]
    if found["kind"] == "OSError" and found.get("errno") is not None:
        raise OSError(found["errno"], found["error"])
    raise KINDS[found["kind"]](found["error"])
