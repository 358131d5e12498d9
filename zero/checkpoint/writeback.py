"""Have the kernel begin to write dirty pages of a file, so that the sync at its end finds little to do."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, do not wait; errors stay for fsync to report


def begin_writeback(file: int) -> None:
    """A hint about all of an open file; does nothing where the system has no such call."""
    call = _call()
    if call is not None:
        call(file, 0, 0, _WRITE)  # 0 bytes: up to the end


@functools.cache
def _call() -> Callable[[int, int, int, int], int] | None:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found
