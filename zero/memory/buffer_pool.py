"""Slots: a few pieces of host memory through which state passes between a drive and whoever uses it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Motion(Protocol):
    """Something that uses the memory of a slot beside the program: a request to a drive, or a copy to a device."""

    @property
    def done(self) -> bool:
        """Whether it is over."""

    def wait(self) -> None:
        """Wait until it is; OSError where it failed."""


class Reached:
    """The copies of a device up to an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        """See `Motion.done`."""
        return self._event.query()

    def wait(self) -> None:
        """See `Motion.wait`."""
        self._event.synchronize()


class Buffer:
    """One piece of memory.

    memory:  uint8 [nbytes], whole pages of the system, with a storage of its own;
    holder:  whose bytes are in it, or will be when `motions` are over; None: nobody's;
    lent:    how many use it now; while one does, nobody else gets it;
    lender:  the thread that was lent it last;
    wanted:  read ahead of a use that has not come yet;
    blank:   holds nothing of the holder's until somebody has written it;
    written: since it was lent;
    motions: what must be over before anybody may touch it.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.holder: Any = None
        self.lent = 0
        self.lender = 0
        self.wanted = self.blank = self.written = False
        self.motions: list[Motion] = []

    def vacate(self) -> None:
        """Take it from its holder, whose bytes are in the file or worth nothing."""
        if self.holder is not None:
            self.holder.leave()
        self.holder = None
        self.wanted = self.blank = self.written = False


class BufferPool:
    """A few slots of one size, shared by the stores of many units and by the threads that use those.

    Whoever reads ahead gets a slot that nobody needs now, or none. Whoever needs one at once waits for one, and in
    the end takes one that was only read ahead; so two threads never wait for each other, however few slots there are.
    What is in a slot stays there until another unit needs it: a unit that comes back early is not read again.

    lock: held by whoever asks or changes anything here, but not while waiting for a drive;
    failure: what the first request that failed said; everybody who comes later is told;
    seen: called with ("read" or "write", unit) when a request begins; for tests and measurements.
    """

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self.lock = threading.Condition()
        self._process = os.getpid()
        self.failure: RuntimeError | None = None
        self.seen: Callable[[str, str], None] = _nobody
        self._slots = [Buffer(memory) for memory in memories]  # the one that was claimed or used longest ago first

    def claim(self, holder: Any, wait: bool) -> Buffer | None:
        """A slot for `holder`; None where there is none at once and the caller will not `wait`. The lock is held.

        Raises RuntimeError where the calling thread itself has all of them, and would wait for ever.
        """
        while True:
            self.check()
            idle = [slot for slot in self._slots if not slot.lent]
            spare = [slot for slot in idle if not slot.wanted]
            found = next((slot for slot in spare if self._over(slot)), None)
            if found is None and not wait:
                return None
            if found is None and not spare and idle and self._over(idle[-1]):
                found = idle[-1]  # what was read ahead last is needed last
            if found is not None:
                found.vacate()
                found.holder = holder
                self._touch(found)
                return found
            if idle:
                self.settle(spare[0] if spare else idle[-1])
            else:
                self._check_lenders(holder)
                self.lock.wait()

    def entered(self) -> threading.Condition:
        """The lock, to be taken. RuntimeError in a forked process: a thread that is not there may hold it for ever."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"state in files can be used by the process that opened them ({self._process}) only, and this is "
                f"process {os.getpid()}, forked from it; read parameters before the fork"
            )
        return self.lock

    def settle(self, slot: Buffer) -> None:
        """Wait until nothing moves in the slot; the lock is held, and let go meanwhile. Raises what failed."""
        while slot.motions:
            motion = slot.motions[0]
            self.lock.release()
            try:
                # Its error is raised below, where the holder is known not to change.
                _until_done(motion)
            finally:
                self.lock.acquire()
            self._over(slot)

    def used(self, slot: Buffer) -> None:
        """It was used just now; the lock is held."""
        self._touch(slot)
        self.lock.notify_all()

    def check(self) -> None:
        """Raise RuntimeError where a request has failed: what is on the drive, or will be, is not what it should be."""
        if self.failure is not None:
            raise RuntimeError(str(self.failure)) from self.failure

    def fail(self, failure: RuntimeError) -> None:
        """From now on everybody is told."""
        self.failure = self.failure or failure

    def close(self) -> None:
        """Forget the memory; nothing may be moving any more."""
        with self.lock:
            self.fail(RuntimeError("the files of this engine are closed"))
            self._slots.clear()
            self.lock.notify_all()

    def _touch(self, slot: Buffer) -> None:
        self._slots.remove(slot)
        self._slots.append(slot)

    def _over(self, slot: Buffer) -> bool:
        """Whether nothing moves in the slot any more; raises RuntimeError for what failed there."""
        while slot.motions and slot.motions[0].done:
            motion = slot.motions.pop(0)
            try:
                motion.wait()
            except OSError as error:
                self.fail(slot.holder.explain(error))
                raise self.failure from error
        return not slot.motions

    def _check_lenders(self, holder: Any) -> None:
        me = threading.get_ident()
        if all(slot.lender == me for slot in self._slots):
            raise RuntimeError(
                f"{holder} needs a buffer, and all {len(self._slots)} are in use by the code that asks for it; "
                "raise buffer_count in offload_optimizer and offload_param, or use fewer units at once"
            )


def _until_done(motion: Motion) -> None:
    try:
        motion.wait()
    except OSError:
        if not motion.done:
            raise


def _nobody(what: str, unit: str) -> None:
    """The default of `BufferPool.seen`."""
