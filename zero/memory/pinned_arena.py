"""Host memory of an exact size, taken from the system in one piece and cut into tensors.

Neither torch's allocators nor malloc come into it: torch rounds pinned memory up to a power of two, and what malloc
has once given it may keep.
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
from zero.memory.host_bytes import MIB, PAGE
from zero.plan.layout import round_up

_TOUCHED = 16384  # pages in one go of one thread
# madvise(2): MADV_HUGEPAGE and MADV_WIPEONFORK by number, since Python's mmap does not know the second.
_ADVICE = (14, 18)
_THREADS = 8  # that touch pages; more do not make a memory controller faster


class _Mapping(mmap.mmap):
    """Anonymous private memory, given back when nothing refers to it any more; `unpin` is called just before."""

    unpin: Callable[[], None] | None = None
    owner: int = 0

    def __del__(self) -> None:
        """Unpin; a forked child has a mapping, too, but what it inherited was never pinned for it."""
        if self.unpin is not None and self.owner == os.getpid():
            # CUDA may have ended before us; it unpins on its way out.
            with contextlib.suppress(Exception):
                self.unpin()


class PinnedArena:
    """`nbytes` of host memory, whole pages of the system, there from the start.

    nbytes:  what it takes: the number asked for, rounded up to a page of the system and no further;
    address: where it begins; 0 where it is empty;
    pinned:  registered with CUDA, so that copies to and from a GPU run by themselves.

    Every page is touched when the arena is made, in huge pages where the system offers them, so that memory which is
    not there is missed now and not in the middle of a step. Tensors that were taken keep the memory alive: it goes
    back to the system with the last of them, once the arena was closed or forgotten too. Nobody waits for a device
    then; who copies asynchronously must have waited before.

    A forked child, such as a worker of a DataLoader, finds zeros here in place of the contents. Would it inherit
    them, each step of the parent would copy every page that it writes, and pinned ones would be copied at the fork,
    so that the host's memory would have to hold all of it once more for each worker. (Without a mapping at all, the
    child would crash where it reads, and unmap somebody else's memory when it collects the arena.)
    """

    def __init__(self, nbytes: int, device: torch.device, pinned: bool) -> None:
        """Take the memory; `pinned` has an effect for a CUDA `device` only.

        Raises RuntimeError where the system refuses the memory. Where CUDA refuses to register it, a warning is logged
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
        """The next `nbytes` bytes as a uint8 tensor [nbytes] of zeros with a storage of its own, aligned to PAGE.

        Raises RuntimeError when the arena is closed or has not so much left.
        """
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
        """Let go of the memory; tensors that were taken stay valid and keep it until they are gone."""
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
    """Raise RuntimeError where each of the `ranks_on_host` processes cannot have `needed` bytes of host memory.

    To be called before anything is allocated. `table_text` says what the bytes are for. Only this process and host are
    looked at, so whoever has other ranks must tell them.
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
        # A kernel that is too old, or was built without huge pages, says EINVAL; small pages do as well.
        with contextlib.suppress(OSError):
            mapping.madvise(advice)
    return mapping


def _touch(whole: torch.Tensor) -> None:
    """Write a zero into each page, several threads side by side: the system fills pages with zeros on the way."""
    pages = whole[:: mmap.PAGESIZE].split(_TOUCHED)
    with ThreadPoolExecutor(min(_THREADS, cores(), len(pages))) as pool:
        for _ in pool.map(torch.Tensor.zero_, pages):
            pass
