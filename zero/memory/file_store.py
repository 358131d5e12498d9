"""State of one unit in a file: in memory only while it is used, read or written."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zero.kernels.aio import Aio, ScratchFile
from zero.memory.buffer_pool import Buffer, BufferPool, EventTransfer
from zero.memory.store import ALIGNED, move
from zero.plan.layout import round_up


class FileRange(NamedTuple):
    """`nbytes` bytes of a file from byte `offset` on, both whole pages, and whose they are."""

    file: ScratchFile
    offset: int
    nbytes: int
    unit: str
    rank: int

    def __str__(self) -> str:
        return f"unit '{self.unit}' (rank {self.rank})"


class _Entry(NamedTuple):
    """A tensor of the store, and its first element in the buffer."""

    tensor: torch.Tensor
    start: int
    numel: int


class FileStore:
    """A store whose tensors have memory only while they are acquired; otherwise they are empty, of shape [0].

    What failed once is raised, RuntimeError with unit, rank and file, by every later use of any store of the pool.
    """

    resident = False

    def __init__(
        self, range: FileRange, aio: Aio, pool: BufferPool, read_ahead: bool = True, write_behind: bool = True
    ) -> None:
        """`read_ahead`: `fetch` reads; `write_behind`: `write_back` does not wait for its write."""
        self._range = range
        self._aio = aio
        self._pool = pool
        self._read_ahead = read_ahead
        self._write_behind = write_behind
        self._entries: list[_Entry] = []
        self._used = 0
        self._buffer: Buffer | None = None
        self._attached = False  # the tensors are in the buffer

    def __str__(self) -> str:
        return str(self._range)

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Store.put`; RuntimeError where they need more than was reserved in the file."""
        end, entries = self._used, []
        for tensor in (tensor for tensor in tensors if tensor.numel()):
            entries.append(_Entry(tensor, end // tensor.itemsize, tensor.numel()))
            end = round_up(end + tensor.nbytes, ALIGNED)
        if end > round_up(self._range.nbytes, ALIGNED):
            raise RuntimeError(
                f"{self} wants {end} bytes in {self._range.file.path}, where {self._range.nbytes} were reserved at "
                "the start; a state that begins later, such as SGD's momentum in one parameter group, must be in "
                "optimizer.params from the start, or kept with offload_optimizer.device 'cpu'"
            )
        if not entries:
            return
        self.acquire(overwrite=self._used == 0)
        try:
            for entry in entries:
                move(entry.tensor, self._buffer.memory, entry.start * entry.tensor.itemsize)
            self._entries += entries
            self._used = end
        finally:
            self.write_back()

    def fetch(self) -> bool:
        """See `Store.fetch`."""
        pool = self._pool
        with pool.checked_lock():
            pool.check()
            if self._buffer is None:
                if not self._read_ahead or (buffer := pool.claim(self, wait=False)) is None:
                    return False
                self._take(buffer, blank=False)
            self._buffer.prefetched = not self._buffer.users
            return True

    def cancel_fetch(self) -> None:
        """See `Store.cancel_fetch`; what is in the buffer stays there until another unit needs it."""
        with self._pool.checked_lock():
            if self._buffer is not None:
                self._buffer.prefetched = False
                self._pool.lock.notify_all()

    def acquire(self, overwrite: bool = False) -> None:
        """See `Store.acquire`."""
        pool = self._pool
        with pool.checked_lock():
            pool.check()
            if self._buffer is None:
                buffer = pool.claim(self, wait=True)
                if self._buffer is None:
                    self._take(buffer, blank=overwrite)
                else:  # another thread has fetched it while this one waited for a buffer
                    buffer.owner = None
                    pool.used(buffer)
            buffer = self._buffer
            buffer.users += 1
            buffer.last_user = threading.get_ident()
            buffer.prefetched = False
            try:
                pool.wait(buffer)
            except BaseException:
                buffer.users -= 1
                pool.used(buffer)
                raise
            if not self._attached:
                self._attach()

    def write_back(self, changed: bool = True, after: torch.cuda.Event | None = None) -> None:
        """See `Store.write_back`."""
        pool = self._pool
        with pool.lock:
            buffer = self._buffer
            if after is not None:
                buffer.transfers.append(EventTransfer(after))
            buffer.changed = buffer.changed or changed
            buffer.users -= 1
            if buffer.users:
                return
            self._detach()
            changed, blank = buffer.changed, buffer.blank
            buffer.changed = buffer.blank = False
            try:
                if changed:
                    self._write(buffer)
                elif blank:  # it was acquired to be overwritten, and was not
                    buffer.evict()
            finally:
                pool.used(buffer)
            if changed and not self._write_behind:
                pool.wait(buffer)

    def evicted(self) -> None:
        """Another store takes the buffer."""
        self._buffer = None

    def explain(self, error: OSError) -> RuntimeError:
        """The error of a failed request of this store."""
        return RuntimeError(
            f"the state of {self} is lost: {error.strerror or error}. Make sure that the drive is sound and has room "
            "for what else writes there, and start again from the last checkpoint"
        )

    def close(self) -> None:
        """See `Store.close`; requests that were begun end by themselves."""
        self._detach()
        self._entries.clear()

    def _take(self, buffer: Buffer, blank: bool) -> None:
        """Start to fill the buffer that was claimed, unless it stays `blank`."""
        self._buffer, buffer.blank = buffer, blank
        if blank:
            return
        try:
            self._pool.on_request("read", self._range.unit)
            buffer.transfers.append(self._aio.read(self._range.file, self._bytes(buffer), self._range.offset))
        except BaseException:
            buffer.evict()  # it does not hold what it should
            raise

    def _write(self, buffer: Buffer) -> None:
        self._check_length()
        self._pool.on_request("write", self._range.unit)
        buffer.transfers.append(self._aio.write(self._range.file, self._bytes(buffer), self._range.offset))

    def _check_length(self) -> None:
        """Raise RuntimeError where somebody has cut the file: a write would hide that, as the gap reads as zeros."""
        file, start, nbytes, *_ = self._range
        status = os.fstat(file.fd)
        if stat.S_ISREG(status.st_mode) and status.st_size < start + nbytes:  # nothing else has a size
            text = f"write of bytes {start} to {start + nbytes} of {file.path}: the file was cut to {status.st_size}"
            self._pool.fail(self.explain(OSError(errno.EIO, text)))
            self._pool.check()

    def _bytes(self, buffer: Buffer) -> torch.Tensor:
        return buffer.memory.narrow(0, 0, self._range.nbytes)

    def _attach(self) -> None:
        self._attached = True
        storage = self._buffer.memory.untyped_storage()
        for entry in self._entries:
            entry.tensor.set_(storage, entry.start, (entry.numel,), (1,))

    def _detach(self) -> None:
        self._attached = False
        for entry in self._entries:
            entry.tensor.set_()
