"""Divergence is named, not hung: what this rank waits for is known to a thread, and to the other ranks.

The thread that computes pays two attribute writes per wait. Two daemon threads do the rest: `StatusStore` keeps the
ranks' records in the store, `HangDetector` speaks about waits that last and ends those that are in vain.
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
from typing import Any

import torch.distributed as dist

from zero.errors import Parted
from zero.watchdog.device_waits import DeviceWaits
from zero.watchdog.events import Events
from zero.watchdog.hang_detector import EXPLAINS, OUTLIVES, HangDetector
from zero.watchdog.hang_report import Phase, clipped
from zero.watchdog.rank_status import Collective, FailedWait, RankStatus, Waiting
from zero.watchdog.status_store import StatusStore

DIRECTIONS = ("gather", "reduce", "replica gather")


class Watchdog:
    """One per engine, known to the axes of its mesh. Without `start`, as in a world of one, it only counts.

    events: what the engine does, for whoever watches it;
    units: names by index, from which the tags of messages are made;
    order: texts of the collectives begun since the last check, or None when nobody asks for their order;
    store: what ranks tell each other, None where nothing is sent.
    """

    def __init__(self, rank: int = 0) -> None:
        self.status = RankStatus(rank)
        self.events = Events()
        self.units: Sequence[str] = ()
        self.order: list[str] | None = None
        self._counting = threading.Lock()
        self.store: StatusStore | None = None
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
        groups = self._groups = [group]
        self.store = StatusStore(self.status, ranks)
        self._detector = HangDetector(self.status, self.store, groups, timeout, self._device)
        for thread in (self.store, self._detector):
            thread.start()
        # The threads know `status` but not us, so that an engine nobody holds any more takes them along.
        parts = (os.getpid(), self.status, self.store, self._detector)
        at_exit = partial(_end, *parts, Phase.ENDED)
        atexit.register(at_exit)
        self._close = weakref.finalize(self, _forget, at_exit, groups, *parts)
        self._close.atexit = False

    def own(self, group: dist.ProcessGroup) -> None:
        """A process group was made for this engine alone: its waits are ended, too, and it is destroyed at the end."""
        self._groups.append(group)

    @property
    def number(self) -> int:
        """Of this engine among those of its ranks, the same on all of them; 0 where nothing is sent."""
        return 0 if self.store is None else self.store.number

    def began(self, tag: int, sent: int) -> Collective:
        """This rank begins the collective of a message's tag: three per unit, one for each direction."""
        index, direction = divmod(tag, len(DIRECTIONS))
        unit = self.units[index] if index < len(self.units) else f"number {index}"
        return self.begin(DIRECTIONS[direction], unit, sent)

    def begin(self, direction: str, unit: str = "", sent: int = 0) -> Collective:
        """This rank begins a collective, in which so many bytes leave it."""
        status = self.status
        with self._counting:  # an update that runs beside the training loop sends, too
            status.number += 1
            status.sent += sent
            status.last = collective = Collective(direction, unit, status.number, sent)
        if self.order is not None:
            self.order.append(collective.text)
        self.events.began(collective.number)
        return collective

    def wait(self, works: Iterable[dist.Work], collective: Collective, on_host: bool = False) -> None:
        """Wait for the works; RuntimeError that says who is missing when that fails or lasts.

        Where messages end on the device it is the current stream that waits; this thread, too, if `on_host`.
        """
        with self.events.waiting(collective):
            self._wait(works, collective, on_host)

    def _wait(self, works: Iterable[dist.Work], collective: Collective, on_host: bool) -> None:
        waiting, device = Waiting(collective, time.monotonic()), self._device
        try:
            if device is None:
                self.status.waiting = waiting
                for work in works:
                    work.wait()
            else:
                device.order(works, collective, on_host)
                if self.broken:  # what was received is worth nothing
                    raise RuntimeError(self.status.gave_up)
        except RuntimeError as error:
            raise self.explained(waiting, error) from error
        finally:
            if self.status.waiting is waiting:  # else another thread has come to wait
                self.status.waiting = None

    @contextlib.contextmanager
    def sending(self, collective: Collective) -> Iterator[None]:
        """Around the calls that start messages: they fail where a wait would when a connection is closed."""
        try:
            yield
        except RuntimeError as error:
            raise self.explained(Waiting(collective, time.monotonic()), error) from error

    def at_rest(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, no thread of ours asks the device for anything, which would end the capture of a CUDA graph."""
        return contextlib.nullcontext() if self._device is None else self._device.looking

    @contextlib.contextmanager
    def call(self, phase: Phase) -> Iterator[None]:
        """Inside, this rank is in a call of the engine. An exception that leaves it is told to the other ranks."""
        status = self.status
        before, status.phase = status.phase, phase
        if status.failing and not status.gave_up:
            status.failing = False
            self._tell()  # before others take us for lost
        try:
            with self.events.span(phase.value):
                yield
            if phase is Phase.STEP:
                status.steps += 1
        except BaseException as error:
            status.fail(error)
            self._tell()
            raise
        finally:
            status.phase = before

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error that no call of the engine has raised yet; from any thread."""
        self.status.error, self.status.failing = f"{type(error).__name__}: {clipped(str(error))}", True
        self._tell()

    @property
    def broken(self) -> bool:
        """Whether this rank has given up, so that nothing can be sent any more."""
        return bool(self.status.gave_up)

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
        if self.store is not None:
            self.store.poke()


def _end(pid: int, status: RankStatus, store: StatusStore, detector: HangDetector, phase: Phase) -> None:
    """Tell the others and stop the threads; in another process than theirs, a forked one, do nothing."""
    if pid != os.getpid():
        return
    status.phase = phase
    # The interpreter keeps here what it dies of.
    fatal = getattr(sys, "last_value", None) if phase is Phase.ENDED else None
    if phase is Phase.ENDED and not status.failing:
        status.error = f"{type(fatal).__name__}: {clipped(str(fatal))}" if fatal is not None else ""
    detector.end()
    store.end()
    # A thread that is inside the store's code when the interpreter goes may take the process down with it.
    for thread, seconds in ((store, OUTLIVES), (detector, 1.0)):  # its last words are to reach the others
        if thread is not threading.current_thread() and not (thread is store and store.messages.open):
            thread.join(seconds)
    if store.keeps and fatal is not None:
        time.sleep(OUTLIVES)  # the store goes with this process, and nobody could read the reason


def _forget(at_exit: Callable[[], None], groups: Sequence[dist.ProcessGroup], *parts: object) -> None:
    atexit.unregister(at_exit)
    _end(*parts, Phase.DESTROYED)
    for group in groups[1:]:
        with contextlib.suppress(ValueError):  # the default group was destroyed, and it with that
            dist.destroy_process_group(group)
