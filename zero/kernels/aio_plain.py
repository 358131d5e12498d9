"""The pool of workers of csrc/aio.h in plain Python: a fallback without compiled code, and for comparison."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

SHORT = -1  # kAioShort of csrc/aio.h
MAX_THREADS = 64  # kMaxThreads of csrc/aio.h


class PlainRequest:
    """A request in flight, as its blocks; `outcome` holds as in csrc/aio.h."""

    def __init__(self, blocks: Sequence[Future[tuple[int, int]]], nbytes: int) -> None:
        self._blocks, self._nbytes = blocks, nbytes

    def wait(self) -> None:
        """Wait until no worker needs the memory or the file any more."""
        wait(self._blocks)

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(block.done() for block in self._blocks)

    def outcome(self) -> tuple[int, int]:
        """(0, an errno or SHORT; all bytes of the request before this one were moved)."""
        outcomes = [block.result() for block in self._blocks if block.done()]
        failures = [outcome for outcome in outcomes if outcome[0]]
        return min(failures, key=lambda outcome: outcome[1], default=(0, self._nbytes))


class PlainPool:
    """Threads that call preadv and pwritev: `workers` * `depth` of them, but at most MAX_THREADS."""

    def __init__(self, workers: int, depth: int, block: int) -> None:
        self._block = block
        self._threads = ThreadPoolExecutor(min(workers * depth, MAX_THREADS), "zero-aio")

    def submit(self, write: bool, fd: int, data: int, nbytes: int, offset: int, align: int) -> PlainRequest:
        """Begin to move `nbytes` bytes between the address `data` and the file, from `offset` on."""
        spans = [(begin, min(begin + self._block, nbytes)) for begin in range(0, nbytes, self._block)]
        blocks = [self._threads.submit(_move, write, fd, data, *span, offset, align) for span in spans]
        return PlainRequest(blocks, nbytes)

    def close(self) -> None:
        """Wait for all requests and end the threads."""
        self._threads.shutdown()


def _move(write: bool, fd: int, data: int, at: int, end: int, offset: int, align: int) -> tuple[int, int]:
    """Move bytes `at` to `end` of a request; returns 0, an errno or SHORT, and the byte reached."""
    while at < end:
        view = memoryview((ctypes.c_char * (end - at)).from_address(data + at))
        try:
            moved = os.pwritev(fd, [view], offset + at) if write else os.preadv(fd, [view], offset + at)
        except OSError as failure:
            return failure.errno or errno.EIO, at
        # See AioBlock::advance in csrc/aio.cpp.
        way = moved if at + moved == end else moved // align * align
        if way == 0:
            return SHORT, at + moved
        at += way
    return 0, at
