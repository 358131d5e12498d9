"""Stands in for the streams of a GPU: work is done at once, and what would order it is noted.

What a step has queued where, and every event, becomes a program for `stream_order.races`. Each operation of torch is
seen as it is dispatched; the compiled kernels are left out, for their references in torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_emulation.site.torch_cuda import Stream
from fake_nccl import on_fake_nccl
from stand_in_device import PRODUCT, StandIn, StandInEvent, storage_of
from stream_order import Free, Keep, Launch, Program, Record, Span, Take, Wait
from torch.utils._pytree import tree_leaves

from zero.kernels import native
from zero.kernels.aio import Aio, Request
from zero.memory.pending_update import PendingUpdate
from zero.memory.streams import Streams

EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# A wait in these is their caller's.
PASSED_ON = {"streams.py", "watchdog.py", "comm.py", "pending_update.py", "device_waits.py", "hang_detector.py"}


def site() -> str:
    """Which function of the product asks; "" where it is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if file := asker(frame.f_code.co_filename):
            # Of the pool, whoever comes first waits; which of its waits matters depends on how fast a drive is.
            return "" if file == "buffer_pool" else f"{file}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@functools.cache
def asker(path: str) -> str:
    """The name of a file of the product whose waits are its own; "" of any other."""
    file = Path(path)
    return file.stem if path.startswith(PRODUCT) and file.name not in PASSED_ON else ""


def thread_name() -> str:
    """Of the thread that asks."""
    return threading.current_thread().name


class NotedEvent(StandInEvent):
    """Of a stream; complete at once, but nobody may rely on that who has not waited."""

    of: Recorder

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.number = next(self.of.numbers)

    def record(self, stream: Stream | None = None) -> None:
        """After all that the stream does until here."""
        self.of.note(Record((stream or torch.cuda.current_stream()).name, self.number))

    def wait(self, stream: Any = None) -> None:
        """The stream goes on after it."""
        self.of.note(Wait(thread_name(), stream.name, self.number, site()))

    def synchronize(self) -> None:
        """The thread waits."""
        thread, by = thread_name(), site()
        self.of.note(Wait(thread, thread, self.number, by and f"{by} (host)"))

    def query(self) -> bool:
        """The thread asks, and may know from now on."""
        self.synchronize()
        return True


class NotedStream(Stream):
    """As torch.cuda.Stream; named after what it is for."""

    of: Recorder

    def __init__(self, device: torch.device | None = None, priority: int = 0, name: str = "computes") -> None:
        super().__init__(device, priority)
        self.name = name if device is None else self.of.name_of_stream(priority)


class Recorder(StandIn):
    """Inside of `recording`, notes the program of this process."""

    stream_class, event_class, kernels = NotedStream, NotedEvent, None

    def __init__(self) -> None:
        super().__init__()
        self.program: Program = []
        self.numbers = itertools.count()
        self._on = False
        self.priorities: list[int] = []  # of the streams that were made
        self._fields = iter(Streams._fields)
        self._lock = threading.RLock()
        self._buffers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def name_of_stream(self, priority: int) -> str:
        """Of one that is made now."""
        self.priorities.append(priority)
        maker = site()
        of_engine = next(self._fields, None) if maker == "sharded_module.wrap" else None
        return of_engine or f"{maker} {len(self.priorities)}"

    def note(self, entry: Any) -> None:
        """Add to the program."""
        with self._lock:
            if self._on:
                self.program.append(entry)

    # -- what is done on the device

    def taken(self, tensor: torch.Tensor) -> None:
        self._take(self._buffer(tensor), storage_of(tensor).nbytes())

    def keep(self, tensor: torch.Tensor, stream: NotedStream) -> None:
        self.note(Keep(self._buffer(tensor), stream.name, site()))

    def computed(self, func: Any, args: Any, kwargs: Any, out: Any, writes: list[torch.Tensor], blocks: bool) -> None:
        name = func._schema.name.split("::")[1]
        if not self._on or name in EMPTY:
            return
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        known = {storage_of(tensor)._cdata for tensor in given}
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        made = [each for each in made if storage_of(each)._cdata not in known]
        if not made and not writes and any(each.alias_info is not None for each in func._schema.returns):
            return  # a view
        unread = {id(tensor) for tensor in writes} if name in {"copy_", "zero_", "fill_"} else set()
        blocks = blocks or (name in {"_local_scalar_dense", "nonzero", "equal"} and any(map(self.holds, given)))
        self.launch(name, [each for each in given if id(each) not in unread], writes + made, blocks)

    def read(self, tensor: torch.Tensor) -> None:
        super().read(tensor)
        self.launch("tolist", [tensor], [], self.holds(tensor))

    def launch(self, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor], blocks: bool = False) -> None:
        """Note an operation: of the current stream, unless all is on the host, which waits if it `blocks`."""
        thread, stream = thread_name(), torch.cuda.current_stream()
        there = any(map(self.holds, (*reads, *writes)))
        spans = [tuple(filter(None, map(self._span, group))) for group in (reads, writes)]
        self.note(Launch(thread, stream.name if there else None, f"{what} ({site()})", *spans))
        if blocks:
            self.note(Wait(thread, thread, stream.record_event().number))

    def begun(self, message: Any) -> None:
        """NCCL has a stream for each communicator."""
        kind = "gather" if message.text.startswith("all_gather") else "reduction"
        thread, stream = thread_name(), torch.cuda.Stream(name=f"backend's {kind}")
        self.note(Wait(thread, stream.name, torch.cuda.current_stream().record_event().number))
        with torch.cuda.stream(stream):
            self.launch(kind, message.sources, message.targets)
        message.end = stream.record_event()

    def ordered(self, message: Any) -> None:
        """Until now it has kept its tensors."""
        torch.cuda.current_stream().wait_event(message.end)
        self.land(message)
        message.sources, message.targets = [], []

    def _buffer(self, tensor: torch.Tensor) -> int:
        storage = storage_of(tensor)
        number = self._buffers.get(storage)
        return self._number(storage) if number is None else number

    def _number(self, storage: torch.UntypedStorage) -> int:
        self._buffers[storage] = number = next(self.numbers)
        weakref.finalize(storage, self._freed, number).atexit = False
        return number

    def held(self) -> dict[int, int]:
        """Bytes of the buffers that are there, by number."""
        return {number: storage.nbytes() for storage, number in self._buffers.items() if storage.nbytes()}

    def _take(self, number: int, nbytes: int) -> None:
        self.note(Take(thread_name(), torch.cuda.current_stream().name, number, nbytes))

    def _freed(self, number: int) -> None:
        self.note(Free(number))

    def _span(self, tensor: torch.Tensor) -> Span | None:
        if tensor.is_meta or not tensor.numel() or not storage_of(tensor).nbytes():
            return None
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.itemsize
        return Span(self._buffer(tensor), start, start + (last + 1) * tensor.itemsize)

    # -- what is put in place of the product's own, torch's and Python's

    def resized(self, storage: torch.UntypedStorage, nbytes: int, resize: Callable[..., Any]) -> Any:
        """In place of `UntypedStorage.resize_`."""
        with self._lock:
            if self._on:
                if (number := self._buffers.pop(storage, None)) is not None:
                    self.note(Free(number))
                if nbytes:
                    self._take(self._number(storage), nbytes)
        return resize(storage, nbytes)

    def submitted(self, pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, submit: Any) -> Future[Any]:
        """In place of `ThreadPoolExecutor.submit`: both ways order the threads."""
        begin, end = next(self.numbers), next(self.numbers)
        self.note(Record(thread_name(), begin))

        def run(work: Callable[..., Any], *args: Any) -> Any:
            self.note(Wait(thread_name(), thread_name(), begin))
            try:
                with self.on_this_thread():
                    return work(*args)
            finally:
                self.note(Record(thread_name(), end))

        if isinstance(pending := getattr(work, "__self__", None), PendingUpdate):
            pending.end = end  # it is waited for, not the future
            return submit(pool, work, run, *args)
        future = submit(pool, run, work, *args)
        result = future.result

        def joined(timeout: float | None = None) -> Any:
            value = result(timeout)
            self.note(Wait(thread_name(), thread_name(), end))
            return value

        future.result = joined
        return future

    def requested(self, aio: Aio, write: bool, file: Any, tensor: torch.Tensor, offset: int, begin: Any) -> Request:
        """In place of `Aio._begin`: a stream for each request, as they have no order."""
        request = begin(aio, write, file, tensor, offset)
        with torch.cuda.stream(torch.cuda.Stream(name=f"request {next(self.numbers)}")):
            spans = (self._span(tensor),), (Span(-file.fd, offset, offset + tensor.nbytes),)
            thread, stream = thread_name(), torch.cuda.current_stream().name
            self.note(Launch(thread, stream, f"request ({site()})", *(spans if write else spans[::-1])))
            request.end = torch.cuda.current_stream().record_event()
        return request

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Engines made inside have this device, and NCCL where there are several ranks."""

        def waited(request: Request, wait: Any = Request.wait) -> None:
            wait(request)
            request.end.synchronize()

        def ended(pending: PendingUpdate, wait: Any = PendingUpdate.wait) -> None:
            wait(pending)
            if hasattr(pending, "end"):
                self.note(Wait(thread_name(), thread_name(), pending.end))

        def in_place(place: Any, name: str, ours: Callable[..., Any], **more: Any) -> None:
            patch.setattr(place, name, lambda *args, **rest: ours(*args, **more, **rest))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "_find", lambda name: (None, None))
            native.load.cache_clear()
            in_place(Request, "wait", waited)
            in_place(PendingUpdate, "wait", ended)
            in_place(Aio, "_begin", self.requested, begin=Aio._begin)
            in_place(torch.UntypedStorage, "resize_", self.resized, resize=torch.UntypedStorage.resize_)
            in_place(ThreadPoolExecutor, "submit", self.submitted, submit=ThreadPoolExecutor.submit)
            try:
                with on_fake_nccl(patch, hosts=True, device=self) if dist.get_world_size() > 1 else self:
                    yield
            finally:
                native.load.cache_clear()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """What is done inside becomes the program."""
        self._on = True
        try:
            yield
        finally:
            self._on = False
