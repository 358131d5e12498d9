"""An unnamed file for data that is not needed after the process, and memory aligned for it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

# Addresses, sizes and offsets in a file are multiples of this, in bytes: O_DIRECT requires the size of a sector or of a
# page, and some drives have sectors of this size.
ALIGN = 4096


def aligned(nbytes: int) -> Tensor:
    """A new tensor of `nbytes` bytes, uint8, shape [nbytes], whose address is a multiple of ALIGN; not filled."""
    whole = torch.empty(nbytes + ALIGN, dtype=torch.uint8)
    first = -whole.data_ptr() % ALIGN
    return whole[first : first + nbytes]


class Descriptor:
    """A file descriptor that is closed when the last object that uses it is collected."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone at interpreter exit
        close(self.fd)


class ScratchFile:
    """An unnamed file in a folder that exists, with its space reserved: `nbytes`, rounded up to a multiple of ALIGN.

    No other process, and no later run, can find it; its space is freed when it is closed or the process ends, however
    that happens. Bytes never written read as zeros. `path` is ``folder / name``, for messages; it does not exist.
    direct: read and write past the page cache (O_DIRECT); the attribute is False where the file system does not do it.

    Raises OSError, with the folder, if it is missing or not writable, or has too little free space (ENOSPC; wanted and
    free bytes are named), and ValueError for a negative size.
    """

    def __init__(self, folder: Path, nbytes: int, name: str, direct: bool = True) -> None:
        if nbytes < 0:
            raise ValueError(f"nbytes: got {nbytes}; wanted at least 0")
        folder = Path(folder)
        self.path = folder / name
        self.nbytes = -(-nbytes // ALIGN) * ALIGN
        descriptor = Descriptor(_unnamed(folder))
        self.direct = direct and _set_direct(descriptor.fd)
        _reserve(descriptor.fd, folder, self.nbytes)
        self._descriptor: Descriptor | None = descriptor

    @property
    def descriptor(self) -> Descriptor:
        """The object that keeps the file open; ValueError once it is closed."""
        if self._descriptor is None:
            raise ValueError(f"file: got {self.path}, which is closed; wanted an open one")
        return self._descriptor

    @property
    def fd(self) -> int:
        """The file descriptor; ValueError once the file is closed."""
        return self.descriptor.fd

    def close(self) -> None:
        """Release the file and its space as soon as no request is in flight. Calling it again does nothing."""
        self._descriptor = None


def _unnamed(folder: Path) -> int:
    """Open a file that no folder lists, for reading and writing."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            # Not supported by this file system, or (the last) by this kernel.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR):
                raise
    # Listed for a moment, empty, and under a name that is never opened again.
    fd, name = tempfile.mkstemp(prefix=".zero-", suffix=".scratch", dir=folder)
    os.unlink(name)
    return fd


def _set_direct(fd: int) -> bool:
    """Switch O_DIRECT on; returns whether the file system supports it."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _reserve(fd: int, folder: Path, nbytes: int) -> None:
    """Make the file `nbytes` long, with reserved space if the file system supports that."""
    system = os.fstatvfs(fd)
    free = system.f_bavail * system.f_frsize
    # Checked before it is tried: trying would fill the drive for a moment, and other programs' writes would fail.
    code = errno.ENOSPC if nbytes > free and system.f_blocks > 0 else _allocate(fd, nbytes)
    if code == 0:
        return
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        os.ftruncate(fd, nbytes)
        return
    raise OSError(code, f"a scratch file wants {nbytes} bytes, {free} are free: {os.strerror(code)}", str(folder))


def _allocate(fd: int, nbytes: int) -> int:
    """fallocate(2); returns 0 or an errno. Not posix_fallocate(3), whose fallback writes every page."""
    if nbytes == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return errno.ENOSYS
    while libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return ctypes.get_errno()
    return 0
