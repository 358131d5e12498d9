"""Divergence is named, not hung: what this rank waits for is known to a thread, and to the other ranks.

The thread that computes pays two attribute writes per wait. Two daemon threads do the rest: `Board` keeps the
ranks' records in the store, `Sentry` speaks about waits that last and ends those that are in vain.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch.distributed as dist

from zero.plan.whereabouts import Place, cause, clipped
from zero.watch.board import Board
from zero.watch.sentry import EXPLAINS, OUTLIVES, Sentry
from zero.watch.standing import Collective, Loss, Standing, Waiting

DIRECTIONS = ("gather", "reduce", "replica gather")


class Watch:
    """One per engine, known to the axes of its mesh. Without `start`, as in a world of one, it only counts.

    units: names by index, from which the tags of messages are made;
    order: texts of the collectives begun since the last check, or None when nobody asks for their order.
    """

    def __init__(self, rank: int = 0) -> None:
        self.standing = Standing(rank)
        self.units: Sequence[str] = ()
        self.order: list[str] | None = None
        self._counting = threading.Lock()
        self._board: Board | None = None
        self._sentry: Sentry | None = None
        self._close: weakref.finalize | None = None

    def start(self, size: int, group: dist.ProcessGroup, timeout: float, native: bool) -> None:
        """Watch the waits of this engine from now on; `timeout` in seconds."""
        self._board = Board(self.standing, size, group)
        self._sentry = Sentry(self.standing, self._board, group, timeout, native)
        for thread in (self._board, self._sentry):
            thread.start()
        # The threads know `standing` but not us, so that an engine nobody holds any more takes them along.
        parts = (os.getpid(), self.standing, self._board, self._sentry)
        at_exit = partial(_end, *parts, Place.ENDED)
        atexit.register(at_exit)
        self._close = weakref.finalize(self, _forget, at_exit, *parts)
        self._close.atexit = False

    @property
    def number(self) -> int:
        """Of this engine among all of its process group, the same on all ranks; 0 where nothing is sent."""
        return 0 if self._board is None else self._board.number

    @property
    def prefix(self) -> str:
        """Of keys in the store that belong to this engine alone, the same on all ranks; "" where nothing is sent."""
        return "" if self._board is None else self._board.prefix

    def renumber(self, number: int) -> None:
        """See `Board.renumber`."""
        self._board.renumber(number)

    def began(self, tag: int) -> Collective:
        """This rank begins the collective of a message's tag: three per unit, one for each direction."""
        index, direction = divmod(tag, len(DIRECTIONS))
        return self.begin(DIRECTIONS[direction], self.units[index] if index < len(self.units) else f"number {index}")

    def begin(self, direction: str, unit: str = "") -> Collective:
        """This rank begins a collective."""
        standing = self.standing
        with self._counting:  # an update that runs beside the training loop sends, too
            standing.number += 1
            standing.last = made = Collective(direction, unit, standing.number)
        if self.order is not None:
            self.order.append(made.text)
        return made

    def wait(self, works: Iterable[dist.Work], collective: Collective, then: Callable[[], None] | None = None) -> None:
        """Wait for the works and call `then`; RuntimeError that says who is missing when that fails or lasts."""
        waiting = Waiting(collective, time.monotonic())
        self.standing.waiting = waiting
        try:
            for work in works:
                work.wait()
            if then is not None:
                then()
        except RuntimeError as error:
            raise self.explained(waiting, error) from error
        finally:
            if self.standing.waiting is waiting:  # else another thread has come to wait
                self.standing.waiting = None

    @contextlib.contextmanager
    def sending(self, collective: Collective) -> Iterator[None]:
        """Around the calls that start messages: they fail where a wait would when a connection is closed."""
        try:
            yield
        except RuntimeError as error:
            raise self.explained(Waiting(collective, time.monotonic()), error) from error

    @contextlib.contextmanager
    def call(self, place: Place) -> Iterator[None]:
        """Inside, this rank is in a call of the engine. An exception that leaves it is told to the other ranks."""
        standing = self.standing
        before, standing.place = standing.place, place
        if standing.failing and not standing.verdict:
            standing.failing = False
            self._tell()  # before others take us for lost
        try:
            yield
            if place is Place.STEP:
                standing.steps += 1
        except BaseException as error:
            standing.fail(error)
            self._tell()
            raise
        finally:
            standing.place = before

    @contextlib.contextmanager
    def listening(self) -> Iterator[Callable[[], str]]:
        """Around a wait that no collective is part of: gives what says why it is in vain, or "" while it is not.

        It may be so for a moment only: another rank's exception counts until its next call of the engine.
        """
        board = self._board
        if board is None:
            yield lambda: ""
            return
        since = time.monotonic()
        board.listeners += 1
        board.poke()
        try:
            yield lambda: cause(board.view(), sys.maxsize) if board.read_at > since else ""
        finally:
            board.listeners -= 1

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error that no call of the engine has raised yet; from any thread."""
        self.standing.error, self.standing.failing = f"{type(error).__name__}: {clipped(str(error))}", True
        self._tell()

    @property
    def broken(self) -> bool:
        """Whether this rank has given up, so that nothing can be sent any more."""
        return bool(self.standing.verdict)

    def tie(self, owner: object) -> None:
        """End the threads when `owner` is garbage; parameters, which know their units, may keep us longer."""
        if self._close is not None:
            weakref.finalize(owner, self._close).atexit = False

    def close(self) -> None:
        """End the threads; this engine will not communicate any more."""
        if self._close is not None:
            self._close()

    def explained(self, waiting: Waiting, error: RuntimeError) -> RuntimeError:
        """The error of the transport as one that names ranks; takes some seconds to find out who is missing."""
        standing, sentry = self.standing, self._sentry
        line = str(error).strip().partition("\n")[0]
        if sentry is not None and sentry.is_alive():
            standing.loss = Loss(waiting, line, time.monotonic())
            if not standing.verdict:
                sentry.poke()
                sentry.explained.wait(EXPLAINS)
            if standing.verdict and sentry.explained.wait(EXPLAINS):
                return RuntimeError(standing.verdict)
        return RuntimeError(f"rank {standing.rank} could not end the {waiting.collective}: {line}")

    def _tell(self) -> None:
        if self._board is not None:
            self._board.poke()


def _end(pid: int, standing: Standing, board: Board, sentry: Sentry, place: Place) -> None:
    """Tell the others and stop the threads; in another process than theirs, a forked one, do nothing."""
    if pid != os.getpid():
        return
    standing.place = place
    # The interpreter keeps here what it dies of.
    fatal = getattr(sys, "last_value", None) if place is Place.ENDED else None
    if place is Place.ENDED and not standing.failing:
        standing.error = f"{type(fatal).__name__}: {clipped(str(fatal))}" if fatal is not None else ""
    sentry.end()
    board.end()
    # A thread that is inside the store's code when the interpreter goes may take the process down with it.
    for thread, seconds in ((board, OUTLIVES), (sentry, 1.0)):  # its last words are to reach the others
        if thread is not threading.current_thread():
            thread.join(seconds)
    if board.keeps and fatal is not None:
        time.sleep(OUTLIVES)  # the store goes with this process, and nobody could read the reason


def _forget(at_exit: Callable[[], None], *parts: object) -> None:
    atexit.unregister(at_exit)
    _end(*parts, Place.DESTROYED)
