"""What a drive gives to one stream of large requests that go past the page cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import time

NBYTES = 1 << 30  # of the file
PIECE = 1 << 26  # of one request


def disk_rates(folder: str) -> tuple[float, float]:
    """Bytes per second read and written in `folder`, past the page cache where that is possible; writes with fsync."""
    piece = mmap.mmap(-1, PIECE)  # whole pages, as direct requests want
    piece.write(os.urandom(1 << 20) * (PIECE >> 20))
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        path = os.path.join(inside, "rates")
        file = _open(path, os.O_WRONLY | os.O_CREAT)
        begun = time.perf_counter()
        for _ in range(NBYTES // PIECE):
            os.write(file, piece)
        os.fsync(file)
        write = NBYTES / (time.perf_counter() - begun)
        os.close(file)
        file = _open(path, os.O_RDONLY)
        begun = time.perf_counter()
        while os.readv(file, [piece]):
            pass
        read = NBYTES / (time.perf_counter() - begun)
        os.close(file)
    return read, write


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:  # a file system in memory, for one
        return os.open(path, flags, 0o600)
