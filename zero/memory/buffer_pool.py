"""A few buffers of host memory through which state passes between a swap file and its users."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from zero.kernels.aio import Request
from zero.memory.streams import Event


class EventTransfer(NamedTuple):
    """The copies of a device up to an event, as a `Request` to a drive is."""

    event: Event

    @property
    def done(self) -> bool:
        """Whether they have ended."""
        return self.event.query()

    def wait(self) -> None:
        """Wait until they have ended."""
        self.event.synchronize()


class Buffer:
    """One buffer of the pool.

    memory:     uint8 [nbytes], whole pages of the system, with a storage of its own;
    owner:      the store whose bytes it holds, or will hold after `transfers`; None: free;
    users:      how many use it now; while there is one, the buffer keeps its owner;
    last_user:  the thread that acquired it last;
    prefetched: read ahead of a use that has not begun;
    blank:      holds nothing of the owner's until it is written;
    changed:    written since it was acquired;
    transfers:  must end before the buffer is touched.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.owner: Any = None
        self.users = 0
        self.last_user = 0
        self.prefetched = self.blank = self.changed = False
        self.transfers: list[Request | EventTransfer] = []

    def evict(self) -> None:
        """Take the buffer from its owner, whose bytes are in the file or not needed."""
        if self.owner is not None:
            self.owner.buffer = None
        self.owner = None
        self.prefetched = self.blank = self.changed = False


class BufferPool:
    """A few buffers of one size, shared by the stores of many units and by the threads that use those.

    A prefetch gets an idle buffer, or none. A use waits for a buffer, and in the end takes one that was only
    prefetched; so two threads never wait for each other, however few buffers exist. A buffer keeps its contents until
    another unit needs it: a unit that is used again soon is not read again.

    lock:       held for each read and change here, but not while waiting for a drive;
    failure:    the error of the first failed request; every later use raises it again;
    on_request: called with ("read" or "write", unit) when a request begins; for tests and measurements.
    """

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self.lock = threading.Condition()
        self._process = os.getpid()
        self.failure: RuntimeError | None = None
        self.on_request: Callable[[str, str], None] = lambda what, unit: None
        self.buffers = [Buffer(memory) for memory in memories]  # least recently claimed or used first

    def claim(self, owner: Any, wait: bool) -> Buffer | None:
        """A buffer, None if none is idle and not `wait`; RuntimeError if the caller has them all. The lock is held."""
        while True:
            self.check()
            idle = [buffer for buffer in self.buffers if not buffer.users]
            free = [buffer for buffer in idle if not buffer.prefetched]
            buffer = next((buffer for buffer in free if self._complete(buffer)), None)
            if buffer is None and not wait:
                return None
            if buffer is None and not free and idle and self._complete(idle[-1]):
                buffer = idle[-1]  # prefetched last, so needed last
            if buffer is not None:
                buffer.evict()
                buffer.owner = owner
                self._touch(buffer)
                return buffer
            if idle:
                self.wait(free[0] if free else idle[-1])
            else:
                if all(buffer.last_user == threading.get_ident() for buffer in self.buffers):
                    raise RuntimeError(
                        f"{owner} needs a buffer, and all {len(self.buffers)} are in use by the code that asks for it; "
                        "raise buffer_count in offload_optimizer and offload_param, or use fewer units at once"
                    )
                self.lock.wait()

    def checked_lock(self) -> threading.Condition:
        """The lock. RuntimeError in a forked process: a thread that does not exist there may hold the lock for ever."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"state in files can be used by the process that opened them ({self._process}) only, and this is "
                f"process {os.getpid()}, forked from it; read parameters before the fork"
            )
        return self.lock

    def wait(self, buffer: Buffer) -> None:
        """Wait for the buffer's transfers; the lock is held, and released meanwhile. Raises a failed one's error."""
        while buffer.transfers:
            transfer = buffer.transfers[0]
            self.lock.release()
            try:
                transfer.wait()
            except OSError:
                if not transfer.done:  # else its error is raised below, where the owner cannot change
                    raise
            finally:
                self.lock.acquire()
            self._complete(buffer)

    def used(self, buffer: Buffer) -> None:
        """Mark the buffer as used just now; the lock is held."""
        self._touch(buffer)
        self.lock.notify_all()

    def check(self) -> None:
        """Raise RuntimeError if a request has failed: the file is wrong, or will be."""
        if self.failure is not None:
            raise RuntimeError(str(self.failure)) from self.failure

    def fail(self, failure: RuntimeError) -> None:
        """Raise `failure` in every later use."""
        self.failure = self.failure or failure

    def close(self) -> None:
        """Drop the memory; no transfer may still run."""
        with self.lock:
            self.fail(RuntimeError("the files of this engine are closed"))
            self.buffers.clear()
            self.lock.notify_all()

    def _touch(self, buffer: Buffer) -> None:
        self.buffers.remove(buffer)
        self.buffers.append(buffer)

    def _complete(self, buffer: Buffer) -> bool:
        """Whether all transfers of the buffer have ended; raises RuntimeError for one that failed."""
        while buffer.transfers and buffer.transfers[0].done:
            transfer = buffer.transfers.pop(0)
            try:
                transfer.wait()
            except OSError as error:
                self.fail(buffer.owner.explain(error))
                raise self.failure from error
        return not buffer.transfers
