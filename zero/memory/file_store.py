"""State of one unit in a file: in memory only while it is used, or on its way."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zero.kernels.aio import Aio, ScratchFile
from zero.memory.buffer_pool import Buffer, BufferPool, Reached
from zero.memory.store import ALIGNED, move
from zero.plan.layout import round_up


class Place(NamedTuple):
    """`nbytes` bytes of a file from byte `offset` on, both whole pages, and whose they are."""

    file: ScratchFile
    offset: int
    nbytes: int
    unit: str
    rank: int

    def __str__(self) -> str:
        return f"unit '{self.unit}' (rank {self.rank})"


class _Part(NamedTuple):
    """A tensor of the store and where it is in the slot: from element `start`."""

    tensor: torch.Tensor
    start: int
    numel: int


class FileStore:
    """A store whose tensors have memory only while they are lent; otherwise they are empty, of shape [0].

    What failed once is raised, RuntimeError with unit, rank and file, by every later use of any store of the ring.
    """

    permanent = False

    def __init__(self, place: Place, aio: Aio, ring: BufferPool, ahead: bool = True, behind: bool = True) -> None:
        """`ahead`: `fetch` reads; `behind`: `flush` does not wait for its write."""
        self._place = place
        self._aio = aio
        self._ring = ring
        self._ahead = ahead
        self._behind = behind
        self._parts: list[_Part] = []
        self._used = 0
        self._slot: Buffer | None = None
        self._there = False  # the tensors are in the slot

    def __str__(self) -> str:
        return str(self._place)

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Store.put`; RuntimeError where they need more than was reserved in the file."""
        start, parts = self._used, []
        for tensor in (tensor for tensor in tensors if tensor.numel()):
            parts.append(_Part(tensor, start // tensor.itemsize, tensor.numel()))
            start = round_up(start + tensor.nbytes, ALIGNED)
        if start > round_up(self._place.nbytes, ALIGNED):
            raise RuntimeError(
                f"{self} wants {start} bytes in {self._place.file.path}, where {self._place.nbytes} were reserved at "
                "the start; a state that begins later, such as SGD's momentum in one parameter group, must be in "
                "optimizer.params from the start, or kept with offload_optimizer.device 'cpu'"
            )
        if not parts:
            return
        self.lend(blank=self._used == 0)
        try:
            for part in parts:
                move(part.tensor, self._slot.memory, part.start * part.tensor.itemsize)
            self._parts += parts
            self._used = start
        finally:
            self.flush()

    def fetch(self) -> bool:
        """See `Store.fetch`."""
        ring = self._ring
        with ring.entered():
            ring.check()
            if self._slot is None:
                if not self._ahead or (slot := ring.claim(self, wait=False)) is None:
                    return False
                self._take(slot, blank=False)
            self._slot.wanted = not self._slot.lent
            return True

    def unfetch(self) -> None:
        """See `Store.unfetch`; what is in the slot stays there until another unit needs it."""
        with self._ring.entered():
            if self._slot is not None:
                self._slot.wanted = False
                self._ring.lock.notify_all()

    def lend(self, blank: bool = False) -> None:
        """See `Store.lend`."""
        ring = self._ring
        with ring.entered():
            ring.check()
            if self._slot is None:
                slot = ring.claim(self, wait=True)
                if self._slot is None:
                    self._take(slot, blank)
                else:  # another thread brought it while this one waited for a slot
                    slot.holder = None
                    ring.used(slot)
            slot = self._slot
            slot.lent += 1
            slot.lender = threading.get_ident()
            slot.wanted = False
            try:
                ring.settle(slot)
            except BaseException:
                slot.lent -= 1
                ring.used(slot)
                raise
            if not self._there:
                self._there = True
                for part in self._parts:
                    self._point(part)

    def flush(self, written: bool = True, after: torch.cuda.Event | None = None) -> None:
        """See `Store.flush`."""
        ring = self._ring
        with ring.lock:
            slot = self._slot
            if after is not None:
                slot.motions.append(Reached(after))
            slot.written = slot.written or written
            slot.lent -= 1
            if slot.lent:
                return
            self._hide()
            changed, blank = slot.written, slot.blank
            slot.written = slot.blank = False
            try:
                if changed:
                    self._write(slot)
                elif blank:  # nobody wrote what it was taken for
                    slot.vacate()
            finally:
                ring.used(slot)
            if changed and not self._behind:
                ring.settle(slot)

    def leave(self) -> None:
        """Another one takes the slot."""
        self._slot = None

    def explain(self, error: OSError) -> RuntimeError:
        """What to tell of a request of this store that failed."""
        return RuntimeError(
            f"the state of {self} is lost: {error.strerror or error}. Make sure that the drive is sound and has room "
            "for what else writes there, and start again from the last checkpoint"
        )

    def close(self) -> None:
        """See `Store.close`; what is on its way arrives, and nobody waits for it."""
        self._hide()
        self._parts.clear()

    def _take(self, slot: Buffer, blank: bool) -> None:
        """Begin to fill the slot that was claimed."""
        self._slot, slot.blank = slot, blank
        if blank:
            return
        try:
            self._ring.seen("read", self._place.unit)
            slot.motions.append(self._aio.read(self._place.file, self._bytes(slot), self._place.offset))
        except BaseException:
            slot.vacate()  # it does not hold what it should
            raise

    def _write(self, slot: Buffer) -> None:
        self._check_length()
        self._ring.seen("write", self._place.unit)
        slot.motions.append(self._aio.write(self._place.file, self._bytes(slot), self._place.offset))

    def _check_length(self) -> None:
        """Raise RuntimeError where somebody has cut the file: a write would hide that, as the gap reads as zeros."""
        file, start, nbytes, *_ = self._place
        found = os.fstat(file.fd)
        if stat.S_ISREG(found.st_mode) and found.st_size < start + nbytes:  # nothing else has a size
            text = f"write of bytes {start} to {start + nbytes} of {file.path}: the file was cut to {found.st_size}"
            self._ring.fail(self.explain(OSError(errno.EIO, text)))
            self._ring.check()

    def _bytes(self, slot: Buffer) -> torch.Tensor:
        return slot.memory.narrow(0, 0, self._place.nbytes)

    def _point(self, part: _Part) -> None:
        part.tensor.set_(self._slot.memory.untyped_storage(), part.start, (part.numel,), (1,))

    def _hide(self) -> None:
        self._there = False
        for part in self._parts:
            part.tensor.set_()
