"""Bytes of a file to their place with their checksums, straight from the page cache: read once and written once.

A read copies into a place and a checksum then fetches it from there again; of a mapping both take the same look. Only
pages that the kernel has brought are touched, since touching one that cannot be brought would end the process.
"""

from __future__ import annotations

import mmap
import sys

from zero.kernels.crc32 import crc32_copy

_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14: bring the pages, or say that it cannot be done
_LEAST = 1 << 16  # bytes; for fewer a read costs less than a mapping


def copy_mapped(file: int, offset: int, target: memoryview, chunk: int) -> list[int] | None:
    """Fill `target` with the bytes of an open file from `offset` on; returns the CRC-32 of each `chunk` bytes.

    None where that is not to be done by a mapping: the system or the file system has no such call, the file ends
    before, a page cannot be read, or there is little to copy. The target is as before then, and a plain read says why.
    """
    if target.nbytes < _LEAST or sys.platform != "linux":
        return None
    inside = offset % mmap.ALLOCATIONGRANULARITY
    try:
        held = mmap.mmap(file, inside + target.nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset - inside)
    except (OSError, ValueError):  # ValueError: the file ends before
        return None
    with held:
        try:
            held.madvise(mmap.MADV_WILLNEED)  # a drive is asked for all of it, and not page by page
            held.madvise(_POPULATE_READ)
        except OSError:
            return None
        with memoryview(held) as whole, whole[inside:] as source:
            return crc32_copy(source, target, chunk)
