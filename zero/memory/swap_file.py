"""The file in which one rank keeps one kind of state, and the buffers of host memory it is used through."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zero.kernels.aio import Aio, ScratchFile
from zero.log import log_once, logger
from zero.memory.buffer_pool import BufferPool
from zero.memory.file_store import FileRange, FileStore


class Requests(NamedTuple):
    """How a drive is accessed; see `Aio`. read_ahead, write_behind: while other units are used."""

    threads: int = 1
    queue_depth: int = 8
    block_size: int = 1 << 20
    read_ahead: bool = True
    write_behind: bool = True


class SwapFile:
    """One file of one rank, with a range for each unit, in the order of the calls of `store`.

    pool: buffers that all units share.
    """

    def __init__(
        self,
        folder: str,
        kind: str,
        rank: int,
        nbytes: int,
        buffers: Sequence[torch.Tensor],
        aio: Aio,
        requests: Requests,
    ) -> None:
        """Reserve `nbytes` in a file in `folder`, which is made if need be.

        `kind`: "optimizer" or "param", as in the JSON. Raises RuntimeError, with the folder and what is wrong, if
        that cannot be.
        """
        self._rank = rank
        self._aio = aio
        self._requests = requests
        self._end = 0
        self.pool = BufferPool(buffers)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = ScratchFile(Path(folder), nbytes, f"zero-{kind}-of-rank-{rank}")
        except OSError as error:
            raise RuntimeError(
                f"zero_optimization.offload_{kind}.nvme_path: {error} (rank {rank}); name a folder that can be written "
                f"and has {nbytes} bytes free for each rank that uses it, or keep this state on 'cpu'"
            ) from error
        if not self._file.direct:
            log_once(
                logging.WARNING,
                f"{folder}: the file system has no direct access (O_DIRECT); what is kept there goes through the page "
                "cache and takes main memory",
            )

    @property
    def path(self) -> Path:
        """The name of the file in messages; the folder does not list it."""
        return self._file.path

    def store(self, unit: str, nbytes: int) -> FileStore:
        """A store for `nbytes` bytes, whole pages, of a unit."""
        range = FileRange(self._file, self._end, nbytes, unit, self._rank)
        self._end += nbytes
        return FileStore(range, self._aio, self.pool, self._requests.read_ahead, self._requests.write_behind)

    def close(self) -> None:
        """Free the file and its space; no request may run any more."""
        self.pool.close()
        self._file.close()


def close_all(files: Sequence[SwapFile], aio: Aio | None) -> None:
    """Wait for all requests, then close the files."""
    if aio is not None:
        try:
            aio.close()
        except OSError as error:  # nobody wants the values any more
            logger.warning("while files of offloaded state were closed: %s", error)
    for file in files:
        file.close()
