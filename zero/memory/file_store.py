"""State in files: the state of a unit is in memory only while it is used, read or written."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from zero.kernels.aio import Aio, ScratchFile
from zero.log import log_once, logger
from zero.memory.buffer_pool import Buffer, BufferPool, EventTransfer
from zero.memory.store import PassingStore
from zero.memory.streams import Event


class SwapFile:
    """One file of one rank for one kind of state, with a range for each unit, in the order of the calls of `store`.

    pool: buffers of host memory, shared by all units; read_ahead, write_behind: while other units are used.
    """

    def __init__(
        self,
        folder: str,
        kind: str,
        rank: int,
        nbytes: int,
        buffers: Sequence[torch.Tensor],
        aio: Aio,
        read_ahead: bool = True,
        write_behind: bool = True,
    ) -> None:
        """Reserve `nbytes` in a file in `folder`, which is created if it is missing.

        `kind`: "optimizer" or "param", as in the JSON. Raises RuntimeError with the folder and the cause if that fails.
        """
        self.rank = rank
        self.aio = aio
        self.read_ahead = read_ahead
        self.write_behind = write_behind
        self.pool = BufferPool(buffers)
        self._end = 0
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.file = ScratchFile(Path(folder), nbytes, f"zero-{kind}-of-rank-{rank}")
        except OSError as error:
            raise RuntimeError(
                f"zero_optimization.offload_{kind}.nvme_path: {error} (rank {rank}); name a folder that can be written "
                f"and has {nbytes} bytes free for each rank that uses it, or keep this state on 'cpu'"
            ) from error
        if not self.file.direct:
            log_once(
                logging.WARNING,
                f"{folder}: the file system has no direct access (O_DIRECT); what is kept there goes through the page "
                "cache and takes main memory",
            )

    def store(self, unit: str, nbytes: int) -> FileStore:
        """A store for `nbytes` bytes, whole pages, of a unit."""
        start, self._end = self._end, self._end + nbytes
        return FileStore(self, unit, start, nbytes)

    def close(self) -> None:
        """Free the file and its space; no request may still run."""
        self.pool.close()
        self.file.close()


def close_all(files: Iterable[SwapFile], aio: Aio | None) -> None:
    """Wait for all requests, then close the files."""
    if aio is not None:
        try:
            aio.close()
        except OSError as error:  # the values are no longer needed
            logger.warning("while files of offloaded state were closed: %s", error)
    for file in files:
        file.close()


class FileStore(PassingStore):
    """A store whose tensors are in the file unless they are acquired; buffer: where they are, or will be, else None.

    After a failed request every later use of any store of the pool raises RuntimeError with unit, rank and file.
    """

    def __init__(self, drive: SwapFile, unit: str, start: int, nbytes: int) -> None:
        """For `nbytes` bytes of the file from byte `start` on, both whole pages."""
        super().__init__(nbytes)
        self._drive, self._pool = drive, drive.pool
        self._unit, self._start = unit, start
        self.buffer: Buffer | None = None

    def __str__(self) -> str:
        return f"unit '{self._unit}' (rank {self._drive.rank})"

    @property
    def place(self) -> torch.Tensor:
        return self.buffer.memory

    def fetch(self) -> bool:
        pool = self._pool
        with pool.checked_lock():
            pool.check()
            if self.buffer is None:
                if not self._drive.read_ahead or (buffer := pool.claim(self, wait=False)) is None:
                    return False
                self._take(buffer, blank=False)
            self.buffer.prefetched = not self.buffer.users
            return True

    def cancel_fetch(self) -> None:
        """See `Store.cancel_fetch`; what is in the buffer stays there until another unit needs it."""
        with self._pool.checked_lock():
            if self.buffer is not None:
                self.buffer.prefetched = False
                self._pool.lock.notify_all()

    def acquire(self, overwrite: bool = False) -> None:
        pool = self._pool
        with pool.checked_lock():
            pool.check()
            if self.buffer is None:
                buffer = pool.claim(self, wait=True)
                if self.buffer is None:
                    self._take(buffer, blank=overwrite)
                else:  # another thread has fetched it while this one waited for a buffer
                    buffer.owner = None
                    pool.used(buffer)
            buffer = self.buffer
            buffer.users += 1
            buffer.last_user = threading.get_ident()
            buffer.prefetched = False
            try:
                pool.wait(buffer)
            except BaseException:
                buffer.users -= 1
                pool.used(buffer)
                raise
            if not self.attached:
                self.attach()

    def write_back(self, changed: bool = True, after: Event | None = None) -> None:
        pool = self._pool
        with pool.lock:
            buffer = self.buffer
            if after is not None:
                buffer.transfers.append(EventTransfer(after))
            buffer.changed = buffer.changed or changed
            buffer.users -= 1
            if buffer.users:
                return
            self.detach()
            changed, blank = buffer.changed, buffer.blank
            buffer.changed = buffer.blank = False
            try:
                if changed:
                    self._write(buffer)
                elif blank:  # acquired to be overwritten, but not written
                    buffer.evict()
            finally:
                pool.used(buffer)
            if changed and not self._drive.write_behind:
                pool.wait(buffer)

    def explain(self, error: OSError) -> RuntimeError:
        """The error of a failed request of this store."""
        return RuntimeError(
            f"the state of {self} is lost: {error.strerror or error}. Make sure that the drive is sound and has room "
            "for what else writes there, and start again from the last checkpoint"
        )

    def _take(self, buffer: Buffer, blank: bool) -> None:
        """Start to fill the claimed buffer, unless it stays `blank`."""
        self.buffer, buffer.blank = buffer, blank
        if blank:
            return
        try:
            self._pool.on_request("read", self._unit)
            buffer.transfers.append(self._drive.aio.read(self._drive.file, self._bytes(buffer), self._start))
        except BaseException:
            buffer.evict()  # its contents are wrong
            raise

    def _write(self, buffer: Buffer) -> None:
        """Start to write; RuntimeError if the file was truncated, which a write would hide: the gap reads as zeros."""
        file, start, nbytes = self._drive.file, self._start, self.nbytes
        status = os.fstat(file.fd)
        if stat.S_ISREG(status.st_mode) and status.st_size < start + nbytes:  # nothing else has a size
            text = f"write of bytes {start} to {start + nbytes} of {file.path}: the file was cut to {status.st_size}"
            self._pool.fail(self.explain(OSError(errno.EIO, text)))
            self._pool.check()
        self._pool.on_request("write", self._unit)
        buffer.transfers.append(self._drive.aio.write(file, self._bytes(buffer), start))

    def _bytes(self, buffer: Buffer) -> torch.Tensor:
        return buffer.memory.narrow(0, 0, self.nbytes)
