"""Where the inputs of recomputed calls are between forward and backward: cut over ranks, in one block, in host memory.

The forward stores the tensors of a call together, and the backward reads them back. While one call is recomputed, the
inputs of the preceding call, which the backward needs next, are already being copied back.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from zero.config.sections import ActivationCheckpointing
from zero.core import comm
from zero.core.comm import Axis
from zero.log import log_once, rank_zero
from zero.memory.pinned_arena import PinnedArena
from zero.memory.streams import SideStream, wait_event
from zero.plan.layout import round_up
from zero.plan.memory import PAGE

ALIGNMENT = 64  # bytes at which a tensor begins inside a buffer

ALONE = Axis(None, 1, 0, False)

NO_NUMBER = "is missing; contiguous_memory_optimization takes room for so many calls"


class CallTimes:
    """Adds up calls until all were recomputed, or the next forward has run, and then logs one line."""

    def __init__(self) -> None:
        self._seconds: tuple[list[float], list[float]] = [], []  # of forwards, of recomputations

    def add(self, again: bool, seconds: float) -> None:
        """Add the seconds of one forward, or of one recomputation (`again`)."""
        if not again and self._seconds[1]:
            self._log()
        self._seconds[again].append(seconds)
        if again and len(self._seconds[1]) >= len(self._seconds[0]):
            self._log()

    def _log(self) -> None:
        numbers = [number for each in self._seconds for number in (len(each), sum(each) * 1e3)]
        rank_zero(logging.INFO, "recomputed calls: %d forward in %.2f ms, %d again in %.2f ms", *numbers)
        self._seconds = [], []


class InputBuffers:
    """Memory for saved inputs, on the device or in host memory, released with their graph.

    With `count`, that many buffers of the first requested size are cut out of one block. Without it, host buffers
    are allocated one by one and kept for the next step; device memory comes from torch, which caches it.
    """

    def __init__(self, device: torch.device, host: bool, count: int | None, copies: SideStream) -> None:
        self._device = device
        self._host = host
        self._count = count
        self._copies = copies
        self._size: int | None = None  # of a buffer of the block, in bytes
        self._free: list[torch.Tensor] = []
        self.nbytes = 0  # allocated, including free buffers; memory in torch's cache is not counted

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of at least `nbytes` bytes, not initialised."""
        if self._count is not None and self._size is None:
            self._size = round_up(nbytes, PAGE)
            self._free += self._new(self._size * self._count).split(self._size)
        fitting = [buffer for buffer in self._free if buffer.numel() >= nbytes]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not best]
            return best
        if self._count is not None:
            log_once(
                logging.WARNING,
                f"activation_checkpointing.number_checkpoints: a call with {nbytes} bytes finds no room in the block "
                f"of {self._count} x {self._size} bytes; what does not fit takes memory of its own",
            )
        if not self._keeps:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if self._free and self._count is None:  # too small for this request, and so for later ones
            self._copies.synchronize()
            self.nbytes -= self._free.pop().numel()
        return self._new(nbytes)

    def release(self, buffer: torch.Tensor) -> None:
        """Free these bytes; copies that were queued before may still read them."""
        if self._keeps and (self._count is None or buffer.numel() == self._size):
            self._free.append(buffer)  # what writes it next is queued behind them
        elif self._keeps:  # it did not fit into the block, or belongs to a closed one
            self._copies.synchronize()
            self.nbytes -= buffer.numel()

    def close(self) -> None:
        """Free unused buffers; those in use are freed once they are released and `close` is called again."""
        self._copies.synchronize()
        self.nbytes -= sum(buffer.numel() for buffer in self._free)
        self._free = []
        self._size = None

    @property
    def _keeps(self) -> bool:
        return self._host or self._count is not None

    def _new(self, nbytes: int) -> torch.Tensor:
        self.nbytes += nbytes
        if self._host:
            return PinnedArena(nbytes, self._device, pinned=True).take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class SavedTensor(NamedTuple):
    """A placeholder for a saved tensor; keeps its call alive, and so its memory."""

    call: SavedCall
    index: int


class SavedCall:
    """The saved tensors of one call. Their buffer lives as long as the graph needs it."""

    def __init__(
        self, store: InputStore, tensors: Sequence[torch.Tensor], before: weakref.ref[SavedCall] | None
    ) -> None:
        self._store = store
        self._before = before
        self._device = tensors[0].device
        # Shape, strides and dtype of the restored copies; strides are the same if a tensor was dense.
        self._likes = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        counts = [-(-tensor.numel() // store.axis.size) for tensor in tensors]
        sizes = [count * tensor.itemsize for count, tensor in zip(counts, tensors, strict=True)]
        buffer = store.buffers.take(sum(round_up(size, ALIGNMENT) for size in sizes))
        weakref.finalize(self, store.buffers.release, buffer).atexit = False
        self._slices, start = [], 0
        for size, tensor in zip(sizes, tensors, strict=True):
            self._slices.append(buffer.narrow(0, start, size).view(tensor.dtype))
            start += round_up(size, ALIGNMENT)
        self._fetched: dict[int, torch.Tensor] = {}  # own slices, fetched or being fetched
        self._event: Any = None
        for part, tensor, like in zip(self._slices, tensors, self._likes, strict=True):
            self._put(part, tensor, like)

    def fetch(self) -> None:
        """Start to copy the own slices back to the device."""
        if self._fetched:
            return
        for index, part in enumerate(self._slices):
            self._fetched[index] = torch.empty(part.shape, dtype=part.dtype, device=self._device)
            # Allocated on the computing stream, written on the copies': if freed, it must not be reused before that.
            self._store.copies.record_stream(self._fetched[index])
        with self._store.copies.after_current():
            for index, part in enumerate(self._slices):
                self._fetched[index].copy_(part, non_blocking=True)
        self._event = self._store.copies.record_event()

    def take(self, index: int) -> torch.Tensor:
        """A copy of the tensor, with its values and strides, a leaf that needs a gradient; collective if cut."""
        if index not in self._fetched:
            self._fetched.clear()
            self.fetch()
        wait_event(self._event, self._device)
        flat = self._fetched.pop(index)
        before = self._before() if self._before is not None else None
        if before is not None and self._store.settings.cpu_checkpointing:
            before.fetch()  # which the backward wants next: it comes while this call is recomputed
        axis, like = self._store.axis, self._likes[index]
        if axis.size > 1:
            flat = comm.gather_scalars(flat.view(torch.uint8), axis, "saved inputs").view(-1).view(like.dtype)
        return flat.as_strided(like.shape, like.stride()).requires_grad_()

    def _put(self, part: torch.Tensor, tensor: torch.Tensor, like: torch.Tensor) -> None:
        with torch.no_grad():
            if tensor.stride() != like.stride():
                tensor = torch.empty_like(tensor).copy_(tensor)
            flat = tensor.as_strided((tensor.numel(),), (1,))
            start = self._store.axis.rank * part.numel()
            own = flat[start : start + part.numel()]
            if not self._store.settings.cpu_checkpointing:
                part[: own.numel()].copy_(own)
                return
            if own.is_cuda:
                own = own.clone()  # the call, or who comes after it, may change its input in place before it has left
            with self._store.copies.after_current():
                part[: own.numel()].copy_(own, non_blocking=True)
            self._store.copies.record_stream(own)


class InputStore:
    """Saves the inputs of calls according to `settings`; each rank of `axis` keeps a slice of them."""

    def __init__(
        self, settings: ActivationCheckpointing, axis: Axis = ALONE, device: torch.device | None = None
    ) -> None:
        """`device`: that of the tensors; default: the current CUDA device, else the CPU."""
        if device is None:
            device = (
                torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            )
        self.settings = settings
        self.axis = axis if settings.partition_activations else ALONE
        if settings.partition_activations and self.axis.size == 1:
            log_once(
                logging.WARNING,
                "activation_checkpointing.partition_activations has no effect: there is no group of more than one rank "
                "to cut inputs over; zero.checkpointing.configure(mpu), called before zero.initialize, names one",
            )
        self.copies = SideStream(device)
        count = settings.number_checkpoints if settings.contiguous_memory_optimization else None
        self.buffers = InputBuffers(device, settings.cpu_checkpointing, count, self.copies)
        self._times = CallTimes() if settings.profile else None
        self._waits = device.type == "cuda" and (settings.profile or settings.synchronize_checkpoint_boundary)
        self._device = device
        self._last: weakref.ref[SavedCall] | None = None
        # For tensors that are alive elsewhere, such as one that many blocks read: version, and where they are saved.
        self._known: Any = WeakTensorKeyDictionary()

    def put(self, arguments: Sequence[Any]) -> list[Any]:
        """The values to keep in place of the arguments: what a graph made is saved, as nobody else keeps it."""
        settings, kept = self.settings, list(arguments)
        if not (settings.cpu_checkpointing or settings.contiguous_memory_optimization or self.axis.size > 1):
            return kept
        unsaved = []
        for index, tensor in enumerate(arguments):
            if made_by_graph(tensor) and tensor.device == self._device:
                kept[index] = self._already_saved(tensor)
                if kept[index] is None:
                    unsaved.append(index)
        if unsaved:
            if settings.contiguous_memory_optimization and settings.number_checkpoints is None:
                text = f"activation_checkpointing.number_checkpoints: {NO_NUMBER}, so inputs take memory of their own"
                log_once(logging.INFO, text)
            call = SavedCall(self, [arguments[index] for index in unsaved], self._last)
            self._last = weakref.ref(call)
            for part, index in enumerate(unsaved):
                kept[index] = SavedTensor(call, part)
                self._known[arguments[index]] = (arguments[index]._version, self._last, part)
        return kept

    @contextlib.contextmanager
    def around(self, again: bool) -> Iterator[None]:
        """Around a forward, or around a recomputation (`again`): waits for the device and takes the time."""
        begin = self._now()
        try:
            yield
        finally:
            seconds = self._now() - begin
            if self._times is not None:
                self._times.add(again, seconds)

    def nbytes_of(self, tensor: torch.Tensor) -> int:
        """Bytes on the device that a saved input takes."""
        if not made_by_graph(tensor) or self.settings.cpu_checkpointing:
            return 0
        return -(-tensor.numel() // self.axis.size) * tensor.itemsize

    def _already_saved(self, tensor: torch.Tensor) -> SavedTensor | None:
        version, call, part = self._known.get(tensor, (None, None, 0))
        alive = call() if call is not None else None
        return SavedTensor(alive, part) if alive is not None and version == tensor._version else None

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def restored(item: Any) -> Any:
    """The tensor for a value that `InputStore.put` returned."""
    return item.call.take(item.index) if isinstance(item, SavedTensor) else item


def made_by_graph(tensor: Any) -> bool:
    """Whether it is a tensor that only a graph keeps, as far as can be seen."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return plain and tensor.numel() > 0 and tensor.requires_grad and not tensor.is_leaf
