"""The pool of workers of csrc/aio.h in plain Python: where nothing is compiled, and to compare with."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

SHORT = -1  # kAioShort of csrc/aio.h
MAX_THREADS = 64  # kMaxThreads of csrc/aio.h


class PlainRequest:
    """A request on its way; `outcome` holds as in csrc/aio.h."""

    def __init__(self, blocks: int, nbytes: int) -> None:
        self._left, self._outcome = blocks, (0, nbytes)
        self._lock, self._finished = threading.Lock(), threading.Event()
        if blocks == 0:
            self._finished.set()

    def finish(self, error: int, reached: int) -> None:
        """One block is done with."""
        with self._lock:
            if error and (not self._outcome[0] or reached < self._outcome[1]):
                self._outcome = (error, reached)
            self._left -= 1
            if self._left == 0:
                self._finished.set()

    def wait(self) -> None:
        """Wait until no worker needs the memory or the file any more."""
        self._finished.wait()

    def done(self) -> bool:
        """Whether that is so already."""
        return self._finished.is_set()

    def outcome(self) -> tuple[int, int]:
        """(0, an errno or SHORT; all bytes of the request before this one were moved)."""
        with self._lock:
            return self._outcome


class PlainPool:
    """Threads that call preadv and pwritev: `workers` * `depth` of them, yet at most MAX_THREADS."""

    def __init__(self, workers: int, depth: int, block: int) -> None:
        self._block = block
        self._threads = ThreadPoolExecutor(min(workers * depth, MAX_THREADS), "zero-aio")

    def submit(self, write: bool, fd: int, data: int, nbytes: int, offset: int, align: int) -> PlainRequest:
        """Begin to move `nbytes` bytes between the address `data` and the file, from `offset` on."""
        request = PlainRequest(-(-nbytes // self._block), nbytes)
        for begin in range(0, nbytes, self._block):
            end = min(begin + self._block, nbytes)
            self._threads.submit(_move, request, write, fd, data, begin, end, offset, align)
        return request

    def close(self) -> None:
        """Wait for all requests and end the threads."""
        self._threads.shutdown()


def _move(
    request: PlainRequest, write: bool, fd: int, data: int, begin: int, end: int, offset: int, align: int
) -> None:
    """Bytes `begin` to `end` of a request, which for a fresh one are all its `data` and `offset` say."""
    error, at = 0, begin
    if request.outcome()[0]:  # of a block before this one, as they are begun in order
        at = end
    while at < end:
        view = memoryview((ctypes.c_char * (end - at)).from_address(data + at))
        try:
            moved = os.pwritev(fd, [view], offset + at) if write else os.preadv(fd, [view], offset + at)
        except OSError as failure:
            error = failure.errno or errno.EIO
            break
        # See AioBlock::advance in csrc/aio.cpp.
        way = moved if at + moved == end else moved // align * align
        if way == 0:
            error, at = SHORT, at + moved
            break
        at += way
    request.finish(error, at)
