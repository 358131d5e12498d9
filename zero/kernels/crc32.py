"""CRC-32 checksums of bytes and of tensors' memory, those of ``zlib.crc32``, which is also the fallback."""

from __future__ import annotations

import ctypes
import os
import zlib
from typing import Any

import numpy as np
from torch import Tensor

from zero.kernels.checks import check_on_cpu
from zero.kernels.native import load


def crc32(data: Any, value: int = 0) -> int:
    """Return the CRC-32 of zlib over the bytes of `data`, on the calling thread, which holds no GIL meanwhile.

    ``crc32(b, crc32(a))`` is that of a followed by b.

    Args:
        data: a contiguous object with the buffer protocol (bytes, bytearray, memoryview, mmap ...), or a contiguous
            tensor on the CPU of any dtype and shape, whose bytes are those in memory.
        value: the checksum of what comes before, 0 of nothing.

    Raises:
        ValueError: for anything else, a tensor whose storage was released, or a value outside 0 to 2**32 - 1.
    """
    if not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise ValueError(f"value: got {value!r}; wanted a checksum, an integer from 0 to 2**32 - 1")
    memory, module = _bytes(data), load()
    return zlib.crc32(memory, value) if module is None else module.crc32(memory, value)


def crc32_read(file: int, offset: int, target: Any, chunk: int) -> tuple[int, list[int]]:
    """Read a file from byte `offset` on into `target`, and return how many bytes came, with their checksums.

    They are fewer than `target` has only where the file ends. The checksums are :func:`crc32` of each `chunk` of these
    bytes, the last of which may be shorter, counted piece by piece while they are in the cache.

    Args:
        file: a descriptor that is open for reading; its own position does not count and stays.
        offset: in bytes, at least 0.
        target: contiguous and writable; else as `data` of :func:`crc32`.
        chunk: in bytes, at least 1.

    Raises:
        ValueError: as :func:`crc32`, for a target that is read only, and for a chunk out of range.
        OSError: the file cannot be read.
    """
    if not isinstance(chunk, int) or not 1 <= chunk < 1 << 63:
        raise ValueError(f"chunk: got {chunk!r}; wanted a number of bytes from 1 to 2**63 - 1")
    place, module = _bytes(target, "target"), load()
    if place.nbytes and not place.flags.writeable:
        raise ValueError(f"target: got {place.nbytes} bytes that are read only; wanted memory to read into")
    if module is not None:
        return module.crc32_read(file, offset, place, chunk)
    view, got = memoryview(place), 0
    while got < view.nbytes and (count := os.preadv(file, [view[got:]], offset + got)):
        got += count
    return got, [zlib.crc32(view[begin : min(begin + chunk, got)]) for begin in range(0, got, chunk)]


def _bytes(data: Any, name: str = "data") -> np.ndarray:
    """The memory of `data`, argument `name`, which the caller keeps alive, as uint8."""
    if isinstance(data, Tensor):
        address = check_on_cpu(name, data)
        data = (ctypes.c_ubyte * (data.nbytes if address else 0)).from_address(address)
    try:
        view = memoryview(data)
    except (TypeError, ValueError, BufferError) as error:
        raise ValueError(
            f"{name}: got {type(data).__name__} ({error}); wanted bytes, another object with the buffer protocol, or a "
            "torch.Tensor"
        ) from error
    if not view.c_contiguous:
        raise ValueError(f"{name}: got strides {view.strides} for shape {view.shape}; wanted contiguous memory")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
