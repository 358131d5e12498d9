"""Host memory of an exact size, taken from the system in one piece and cut into tensors.

It uses neither torch's allocators nor malloc: torch rounds pinned memory up to a power of two, and malloc may keep
freed memory.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from zero.kernels.cuda import pin_host
from zero.log import counted, log_once
from zero.memory.available import available_nbytes, cores
from zero.plan.layout import round_up
from zero.plan.memory import MIB, PAGE

_TOUCHED = 16384  # pages per task of one thread
# madvise(2): MADV_HUGEPAGE and MADV_WIPEONFORK by number, since Python's mmap does not know the second.
_ADVICE = (14, 18)
_THREADS = 8  # that touch pages; more do not make a memory controller faster


class _Mapping(mmap.mmap):
    """Anonymous private memory, unmapped when nothing refers to it any more; `unpin` is called just before."""

    unpin: Callable[[], None] | None = None
    owner: int = 0

    def __del__(self) -> None:
        """Unpin; a forked child has the mapping, too, but not pinned."""
        if self.unpin is not None and self.owner == os.getpid():
            # CUDA may have ended earlier; it then has unpinned all memory.
            with contextlib.suppress(Exception):
                self.unpin()


class PinnedArena:
    """`nbytes` of host memory, whole pages of the system, present from the start.

    nbytes:  its size: the number asked for, rounded up to a page of the system and no further;
    address: where it begins; 0 if it is empty;
    pinned:  registered with CUDA, so that copies to and from a GPU are asynchronous.

    Every page is touched when the arena is made, in huge pages if the system offers them, so that missing memory is
    noticed now and not in the middle of a step. Tensors that were taken keep the memory alive: it returns to the system
    with the last of them, once the arena is closed or collected, too. This does not wait for a device: callers that
    copy asynchronously must wait before.

    A forked child, such as a worker of a DataLoader, sees zeros in place of the contents. If it inherited them, each
    step of the parent would copy every page that it writes, and pinned pages would be copied at the fork, so the host
    would need memory for the arena once more for each worker. (Without a mapping, the child would crash when it reads,
    and unmap other memory when it collects the arena.)
    """

    def __init__(self, nbytes: int, device: torch.device, pinned: bool) -> None:
        """Allocate the memory; `pinned` matters only for a CUDA `device`.

        Raises RuntimeError if the system refuses the memory. If CUDA refuses to register it, a warning is logged
        once and `pinned` is False.
        """
        self.nbytes = round_up(nbytes, mmap.PAGESIZE)
        self._taken = 0
        self._mapping = _map(self.nbytes) if nbytes else None
        self._closed = False
        self.address = 0
        self.pinned = False
        if self._mapping is None:
            return
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.address = whole.data_ptr()
        _touch(whole)
        if pinned and device.type == "cuda":
            self._pin(device)

    def take(self, nbytes: int) -> torch.Tensor:
        """The next `nbytes`, uint8 zeros aligned to PAGE; RuntimeError if the arena has fewer left or is closed."""
        if self._closed:
            raise RuntimeError("this arena was closed; take what is needed before")
        start = self._taken
        if start + nbytes > self.nbytes:
            raise RuntimeError(
                f"{nbytes} bytes do not fit into an arena of {self.nbytes} bytes, {start} of which are taken; "
                "the plan of host memory and what is taken differ"
            )
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        self._taken = round_up(start + nbytes, PAGE)
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=start)

    def close(self) -> None:
        """Release the memory; tensors that were taken stay valid and keep it until they are collected."""
        self._closed = True
        self._mapping = None

    def _pin(self, device: torch.device) -> None:
        try:
            self._mapping.unpin = pin_host(self.address, self.nbytes, device)
        except RuntimeError as error:
            log_once(
                logging.WARNING,
                f"host memory could not be pinned ({error}): copies to and from {device} take longer and do not "
                "overlap with other work",
            )
            return
        self._mapping.owner = os.getpid()
        self.pinned = True


def check_room(table_text: str, needed: int, ranks_on_host: int) -> None:
    """Raise RuntimeError if the `ranks_on_host` processes cannot each have `needed` bytes of host memory.

    Call it before anything is allocated. `table_text` says what the bytes are for. It checks only this process and
    host; the caller must tell the other ranks.
    """
    have = available_nbytes(ranks_on_host)
    if needed <= have:
        return
    raise RuntimeError(
        f"too little host memory: each rank needs {needed / MIB:,.1f} MiB and may take {have / MIB:,.1f} MiB, with "
        f"{counted(ranks_on_host, 'rank')} on this host. One rank keeps:\n{table_text}\n"
        "Keep optimizer state in files (offload_optimizer.device 'nvme'), in fewer bytes (optimizer.params.zero, "
        "'master': 'remainder' and 'moments': '8bit') or partly on the device (offload_optimizer.ratio), or use more "
        "hosts; a limit on the process (ulimit -v) or its cgroup may be raised, too"
    )


def _map(nbytes: int) -> _Mapping:
    try:
        mapping = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(
            f"the system refused {nbytes / MIB:,.1f} MiB of host memory ({error}); this process may take "
            f"{available_nbytes() / MIB:,.1f} MiB"
        ) from error
    for advice in _ADVICE if sys.platform == "linux" else ():
        # A kernel that is too old, or was built without huge pages, returns EINVAL; small pages are enough.
        with contextlib.suppress(OSError):
            mapping.madvise(advice)
    return mapping


def _touch(whole: torch.Tensor) -> None:
    """Write a zero into each page, several threads side by side: the system fills pages with zeros on the way."""
    pages = whole[:: mmap.PAGESIZE].split(_TOUCHED)
    with ThreadPoolExecutor(min(_THREADS, cores(), len(pages))) as pool:
        for _ in pool.map(torch.Tensor.zero_, pages):
            pass
