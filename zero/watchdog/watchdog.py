"""Reports diverging ranks instead of hanging: a thread and the other ranks know this rank's waits.

The computing thread pays two attribute writes per wait. Two daemon threads do the rest: `StatusStore` keeps the
ranks' records in the store, `HangDetector` logs long waits and ends the hopeless ones.
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
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist

from zero.errors import Parted
from zero.watchdog.device_waits import DeviceWaits
from zero.watchdog.hang_detector import EXPLAINS, OUTLIVES, HangDetector
from zero.watchdog.hang_report import Phase, clipped
from zero.watchdog.rank_status import Collective, FailedWait, RankStatus, Waiting
from zero.watchdog.status_store import StatusStore
from zero.watchdog.store_barrier import StoreBarrier

Stamp = Any  # a time: a float of time.perf_counter(), or an event of a GPU's stream
Span = Callable[[str, str], AbstractContextManager[Any]]  # (verb, unit) -> around the work
Waited = Callable[[Any, Stamp, Stamp, Stamp], None]  # a Collective, its begin, and one wait for it: begin, end
_NOTHING = contextlib.nullcontext()
_KEPT = 1000  # begins of collectives to keep: never more are in flight
DIRECTIONS = ("gather", "reduce", "replica gather")


class Events:
    """The events of one engine on this rank. Subscribers are called on the thread that does the work.

    Spans are of work on a unit (gather, release, reduce, sum, update, copy, write, "wait read", "wait update") or of a
    call of the engine (the name of its phase, and no unit).

    clock: returns the current time, of the device that waits end on.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], Stamp] = time.perf_counter
        self._spans: tuple[Span, ...] = ()
        self._waits: tuple[Waited, ...] = ()
        self._begun: dict[int, Stamp] = {}  # by number of the collective, while waits have subscribers

    def subscribe(self, span: Span | None = None, waited: Waited | None = None) -> Callable[[], None]:
        """Subscribe to spans, waits, or both; returns a function that ends the subscription."""
        self._spans += () if span is None else (span,)
        self._waits += () if waited is None else (waited,)

        def end() -> None:
            self._spans = tuple(each for each in self._spans if each is not span)
            self._waits = tuple(each for each in self._waits if each is not waited)

        return end

    def span(self, verb: str, unit: str = "") -> AbstractContextManager[Any]:
        """Around work on a unit, or a call of the engine."""
        return self._each(verb, unit) if self._spans else _NOTHING

    def began(self, number: int) -> None:
        """Record the begin of a collective."""
        if self._waits:
            self._begun[number] = self.clock()

    @contextlib.contextmanager
    def waiting(self, collective: Any) -> Iterator[None]:
        """Around a wait for a collective."""
        if not self._waits:
            yield
            return
        start = self.clock()
        yield
        begun, end = self._begun.get(collective.number, start), self.clock()
        for told in self._waits:
            told(collective, begun, start, end)
        if len(self._begun) > 2 * _KEPT:  # another thread may add one meanwhile
            for number in sorted(self._begun)[:_KEPT]:
                self._begun.pop(number, None)

    @contextlib.contextmanager
    def _each(self, verb: str, unit: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for span in self._spans:
                stack.enter_context(span(verb, unit))
            yield


class Watchdog:
    """One per engine, used by the axes of its mesh. Without `start`, as in a world of one, it only counts.

    events: those of the engine, for subscribers;
    units: names by index, from which message tags are made;
    order: texts of the collectives begun since the last check, or None if the order is not checked;
    barrier: of the ranks' saves.
    """

    def __init__(self, rank: int = 0) -> None:
        self.status = RankStatus(rank)
        self.events = Events()
        self.units: Sequence[str] = ()
        self.order: list[str] | None = None
        self._counting = threading.Lock()
        self.barrier = StoreBarrier(self.status)
        self._store: StatusStore | None = None
        self._detector: HangDetector | None = None
        self._device: DeviceWaits | None = None
        self._close: weakref.finalize | None = None

    def start(
        self, ranks: tuple[int, ...], group: dist.ProcessGroup, timeout: float, device: DeviceWaits | None
    ) -> None:
        """Watch the waits of this engine from now on.

        ranks: the global ranks that share the engine, all of `group`; timeout: in seconds; device: takes the waits
        that end there and not in this process (NCCL's), which cannot be ended from here.
        """
        self._device = device
        groups = self._groups = [weakref.ref(group)]
        self.barrier = StoreBarrier(self.status, ranks, timeout)
        self._store = StatusStore(self.status, self.barrier)
        self._detector = HangDetector(self.status, self._store, groups, timeout, self._device)
        for thread in (self._store, self._detector):
            thread.start()
        # The threads hold `status` but not this object, so that they end with a collected engine.
        parts = (os.getpid(), self.status, self._store, self._detector)
        at_exit = partial(_end, *parts, Phase.ENDED)
        atexit.register(at_exit)
        self._close = weakref.finalize(self, _forget, at_exit, groups, *parts)
        self._close.atexit = False

    def own(self, group: dist.ProcessGroup) -> None:
        """Own a process group made only for this engine: its waits are ended, too, and it is destroyed at the end."""
        self._groups.append(weakref.ref(group))

    @property
    def number(self) -> int:
        """This engine's number among those of its ranks, the same on all of them; 0 if nothing is sent."""
        return self.barrier.number

    def began(self, tag: int, sent: int, ranks: tuple[int, ...]) -> Collective:
        """Record the begin of the collective with a message's tag: three per unit, one for each direction."""
        index, direction = divmod(tag, len(DIRECTIONS))
        unit = self.units[index] if index < len(self.units) else f"number {index}"
        return self.begin(DIRECTIONS[direction], unit, sent, ranks)

    def begin(
        self,
        direction: str,
        unit: str = "",
        sent: int = 0,
        ranks: tuple[int, ...] = (),
        needs: tuple[int, ...] = (),
        attends: bool = False,
    ) -> Collective:
        """Record the begin of a collective among `ranks`, which sends `sent` bytes from this rank; see `Collective`.

        `attends`: it is of attention that ranks share.
        """
        status = self.status
        with self._counting:  # an update beside the training loop sends, too
            status.number += 1
            status.sent += sent
            begun = status.begun
            begun.attends |= attends
            attempt = begun.attempt * attends
            turns = begun.turns.setdefault((direction, unit), {})
            turns[ranks, attempt] = turn = turns.get((ranks, attempt), 0) + bool(ranks)
            collective = Collective(direction, unit, status.number, sent, ranks, turn, needs, attempt)
            status.last = collective
        if self.order is not None:
            self.order.append(collective.text)
        self.events.began(collective.number)
        return collective

    def wait(self, works: Iterable[dist.Work], collective: Collective, on_host: bool = False) -> None:
        """Wait for the works; a RuntimeError names the missing ranks if that fails or takes too long.

        If messages end on the device, the current stream waits; this thread, too, if `on_host`.
        """
        with self.events.waiting(collective):
            waiting, device = Waiting(collective, time.monotonic(), threading.get_ident()), self._device
            try:
                if device is None:
                    self.status.waiting = waiting
                    for work in works:
                        work.wait()
                else:
                    device.order(works, collective, on_host)
                    if self.broken:  # the received values are invalid
                        raise RuntimeError(self.status.gave_up)
            except RuntimeError as error:
                raise self.explained(waiting, error) from error
            finally:
                if self.status.waiting is waiting:  # else another thread waits by now
                    self.status.waiting = None

    @contextlib.contextmanager
    def sending(self, collective: Collective) -> Iterator[None]:
        """Around the calls that start messages: with a closed connection they fail like a wait."""
        try:
            yield
        except RuntimeError as error:
            raise self.explained(Waiting(collective, time.monotonic()), error) from error

    @contextlib.contextmanager
    def call(self, phase: Phase) -> Iterator[None]:
        """Inside, this rank is in a call of the engine. An exception that leaves it is reported to the other ranks."""
        status = self.status
        before, status.phase, status.loop = status.phase, phase, threading.get_ident()
        if status.failing and not status.gave_up:
            status.failing = False
            self._tell()  # before other ranks consider this one lost
        try:
            with self.events.span(phase.value):
                yield
            if phase is Phase.STEP:
                status.steps += 1
                # All ranks have come to this step: what one of them raised before does not part them.
                status.begun.attends, status.error = False, status.error if status.failing else ""
        except BaseException as error:
            status.fail(error)
            self._tell()
            raise
        finally:
            status.phase = before

    def fail(self, error: BaseException) -> None:
        """Report an error that no call of the engine has raised yet to the other ranks; from any thread."""
        self.status.error, self.status.failing = f"{type(error).__name__}: {clipped(str(error))}", True
        self._tell()

    @property
    def broken(self) -> bool:
        """Whether this rank has given up, so that it cannot send any more."""
        return bool(self.status.gave_up)

    def tie(self, owner: object) -> None:
        """End the threads when `owner` is collected; parameters may keep this object longer through their units."""
        if self._close is not None:
            weakref.finalize(owner, self._close).atexit = False

    def close(self) -> None:
        """End the threads; this engine no longer communicates."""
        if self._close is not None:
            self._close()

    def explained(self, waiting: Waiting, error: RuntimeError) -> RuntimeError:
        """The transport's error as one that names the missing ranks, which takes some seconds to find out."""
        status, detector = self.status, self._detector
        line = str(error).strip().partition("\n")[0]
        if detector is not None and detector.is_alive():
            status.failed_wait = FailedWait(waiting, line, time.monotonic())
            if not status.gave_up:
                detector.poke()
                detector.explained.wait(EXPLAINS)
            if status.gave_up and detector.explained.wait(EXPLAINS):
                return Parted(status.gave_up)
        return Parted(f"rank {status.rank} could not end the {waiting.collective}: {line}")

    def _tell(self) -> None:
        if self._store is not None:
            self._store.poke()


def _end(pid: int, status: RankStatus, store: StatusStore, detector: HangDetector, phase: Phase) -> None:
    """Tell the other ranks and stop the threads; do nothing in a forked process."""
    if pid != os.getpid():
        return
    status.phase = phase
    # The interpreter keeps its fatal exception here.
    fatal = getattr(sys, "last_value", None) if phase is Phase.ENDED else None
    if phase is Phase.ENDED and not status.failing:
        status.error = f"{type(fatal).__name__}: {clipped(str(fatal))}" if fatal is not None else ""
    detector.end()
    store.end()
    # A thread inside the store's code at interpreter exit may crash the process.
    for thread, seconds in ((store, OUTLIVES), (detector, 1.0)):  # its last record must reach the other ranks
        if thread is not threading.current_thread() and not (thread is store and store.barrier.open):
            thread.join(seconds)
    if store.peers.keeps and fatal is not None:
        time.sleep(OUTLIVES)  # the store ends with this process, and no rank could read the reason


def _forget(at_exit: Callable[[], None], groups: Sequence[weakref.ref[dist.ProcessGroup]], *parts: object) -> None:
    atexit.unregister(at_exit)
    _end(*parts, Phase.DESTROYED)
    for group in filter(None, (ref() for ref in groups[1:])):
        with contextlib.suppress(ValueError):  # it was destroyed together with the default group
            dist.destroy_process_group(group)
