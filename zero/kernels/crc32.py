"""CRC-32 checksums of bytes and of tensors' memory, those of ``zlib.crc32``, which is also the fallback."""

from __future__ import annotations

import ctypes
import os
import zlib
from typing import Any

from torch import Tensor

from zero.kernels.checks import CPU, address_of
from zero.kernels.native import load


def crc32(data: Any, value: int = 0) -> int:
    """zlib's CRC-32 of the bytes of `data`, computed on the calling thread without the GIL.

    data: a contiguous object with the buffer protocol (bytes, memoryview, mmap ...), or a contiguous tensor on the CPU,
    whose bytes are those in memory. value: the checksum of the bytes before; ``crc32(b, crc32(a))`` is that of a
    followed by b. Raises ValueError for another tensor, or one whose storage was released; TypeError, BufferError for
    an object without contiguous bytes.
    """
    view = data  # of a tensor that perhaps nobody else holds
    if isinstance(data, Tensor):
        address = address_of("data", data, device=CPU)
        view = (ctypes.c_ubyte * (data.nbytes if address else 0)).from_address(address)
    module = load()
    return zlib.crc32(view, value) if module is None else module.crc32(view, value)


def crc32_read(file: int, offset: int, target: memoryview, chunk: int) -> tuple[int, list[int]]:
    """Read a file from byte `offset` on into `target`, and return the number of bytes read, with their checksums.

    It is smaller than `target` only if the file ends. The checksums are :func:`crc32` of each `chunk` of these
    bytes, the last of which may be shorter, counted piece by piece while they are in the cache. The position of the
    descriptor `file` is neither used nor changed. OSError where the file cannot be read.
    """
    module = load()
    if module is not None:
        return module.crc32_read(file, offset, target, chunk)
    got = 0
    while got < target.nbytes and (count := os.preadv(file, [target[got:]], offset + got)):
        got += count
    return got, [zlib.crc32(target[begin : min(begin + chunk, got)]) for begin in range(0, got, chunk)]
