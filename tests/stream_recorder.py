"""Stands in for the streams of a GPU and for NCCL, on CPU tensors: work is done at once, and what would order it noted.

What a step has queued where, and every event, becomes a program for `stream_order.races`. Each operation of torch is
seen as it is dispatched; the compiled kernels are left out, for their references in torch. Host memory is that of
`PinnedArena` and `StagingBuffers`, and what comes of these; the threads of updates compute in no other.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offload_cases import as_on_a_gpu
from stream_order import Free, Keep, Launch, Program, Record, Span, Take, Wait
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero.core.comm
import zero.core.mesh
import zero.memory.streams
import zero.optim.norm
from zero.kernels import cuda, native
from zero.kernels.aio import Aio, Request
from zero.memory.host_gradients import StagingBuffers
from zero.memory.pinned_arena import PinnedArena
from zero.memory.streams import Streams

EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
WORKERS = "zero-"  # begins the names of threads that work beside the loop
# A wait in these is their caller's.
PASSED_ON = {"streams.py", "watchdog.py", "comm.py", "pending_update.py", "device_waits.py", "hang_detector.py"}
PRODUCT = str(Path(zero.core.comm.__file__).parents[1])


def site() -> str:
    """Which function of the product asks; "" where it is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if str(path).startswith(PRODUCT) and path.name not in PASSED_ON:
            # Of the pool, whoever comes first waits; which of its waits matters depends on how fast a drive is.
            return "" if path.stem == "buffer_pool" else f"{path.stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def thread_name() -> str:
    """Of the thread that asks."""
    return threading.current_thread().name


class StandInEvent:
    """Of a stream; complete at once, but nobody may rely on that who has not waited."""

    def __init__(self, recorder: Recorder, actor: str) -> None:
        self._recorder, self.number = recorder, next(recorder.numbers)
        recorder.note(Record(actor, self.number))

    def synchronize(self) -> None:
        """The thread waits."""
        thread, by = thread_name(), site()
        self._recorder.note(Wait(thread, thread, self.number, by and f"{by} (host)"))

    def query(self) -> bool:
        """The thread asks, and may know from now on."""
        self.synchronize()
        return True


class StandInStream:
    """As torch.cuda.Stream."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self.name = recorder, name

    def wait_event(self, event: StandInEvent) -> None:
        """Go on after `event`."""
        self._recorder.note(Wait(thread_name(), self.name, event.number, site()))

    def record_event(self) -> StandInEvent:
        """An event after all so far."""
        return StandInEvent(self._recorder, self.name)

    def synchronize(self) -> None:
        """The thread waits for all so far."""
        self.record_event().synchronize()


class StandInWork:
    """A collective of NCCL; its tensors stay until somebody has waited, as NCCL keeps them."""

    def __init__(self, recorder: Recorder, end: StandInEvent, *tensors: torch.Tensor) -> None:
        self._recorder, self._end, self._tensors = recorder, end, tensors

    def wait(self) -> None:
        """The current stream goes on after it."""
        self._recorder.current_stream().wait_event(self._end)
        self._tensors = ()


class Recorder(TorchDispatchMode):
    """Inside of `recording`, notes the program of this process; is what torch.cuda is to zero/memory/streams.py."""

    def __init__(self) -> None:
        super().__init__()
        self.program: Program = []
        self.numbers = itertools.count()
        self._on = False
        self._here = threading.local()
        self.priorities: list[int] = []  # of the streams that were made
        self._fields = iter(Streams._fields)
        self._lock = threading.RLock()
        self._buffers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._hosts: set[int] = set()  # of the buffers
        self._makers: dict[int, str] = {}  # the threads that took them
        self._arenas: list[tuple[int, int]] = []

    # -- what the product asks of torch.cuda

    def Stream(self, device: torch.device, priority: int = 0) -> StandInStream:
        """A new stream."""
        self.priorities.append(priority)
        maker, number = site(), len(self.priorities)
        of_engine = next(self._fields, None) if maker == "sharded_module.wrap" else None
        return StandInStream(self, of_engine or f"{maker} {number}")

    def current_stream(self, device: torch.device | None = None) -> StandInStream:
        """That of this thread."""
        return getattr(self._here, "stream", None) or StandInStream(self, "computes")

    @contextlib.contextmanager
    def stream(self, stream: StandInStream) -> Iterator[None]:
        """It is the current one inside."""
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before

    # -- the program

    def note(self, entry: Any) -> None:
        """Add to the program."""
        with self._lock:
            if self._on:
                self.program.append(entry)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and note what was read and written."""
        kwargs = kwargs or {}
        if getattr(self._here, "quiet", False) or not self._on:
            return func(*args, **kwargs)
        schema = func._schema
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        pairs = list(zip(schema.arguments, args, strict=False))
        pairs += [(each, kwargs[each.name]) for each in schema.arguments if each.name in kwargs]
        changed = [
            tensor
            for argument, value in pairs
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value)
            if isinstance(tensor, torch.Tensor)
        ]
        known = {tensor.untyped_storage()._cdata for tensor in given}
        result = func(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        made = [each for each in made if each.untyped_storage()._cdata not in known]
        if not made and not changed and any(each.alias_info is not None for each in schema.returns):
            return result  # a view
        for tensor in made:
            self._buffer(tensor, new=True)
        name = func._schema.name.split("::")[1]
        if name not in EMPTY:
            unread = {id(tensor) for tensor in changed} if name in {"copy_", "zero_", "fill_"} else set()
            blocks = name in {"_local_scalar_dense", "nonzero", "equal"}
            blocks = blocks or (name == "copy_" and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")))
            self.launch(name, [each for each in given if id(each) not in unread], changed + made, blocks)
        return result

    def launch(self, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor], blocks: bool = False) -> None:
        """Note an operation: of the current stream, unless it is all in host memory; `blocks`: between two memories."""
        thread = thread_name()
        spans = [tuple(filter(None, map(self._span, group))) for group in (reads, writes)]
        touched = {span.buffer for group in spans for span in group}
        entered = self.current_stream().name != "computes"
        on_host = not (touched - self._hosts) and bool(touched)
        on_host = on_host or (thread.startswith(WORKERS) and not entered)
        if on_host:
            self._hosts |= {buffer for buffer in touched if self._makers.get(buffer) == thread}
            self.note(Launch(thread, None, f"{what} ({site()})", *spans))
            return
        self.note(Launch(thread, self.current_stream().name, f"{what} ({site()})", *spans))
        if blocks and (touched & self._hosts or what != "copy_"):
            event = StandInEvent(self, self.current_stream().name)
            self.note(Wait(thread, thread, event.number))

    def _buffer(self, tensor: torch.Tensor, new: bool = False) -> int:
        storage = tensor.untyped_storage()
        number = self._buffers.get(storage)
        if number is None:
            number = self._number(storage)
            if any(start <= storage.data_ptr() < end for start, end in self._arenas):
                self._hosts.add(number)
            if new:
                self._take(number)
        return number

    def _number(self, storage: torch.UntypedStorage) -> int:
        self._buffers[storage] = number = next(self.numbers)
        weakref.finalize(storage, self._freed, number).atexit = False
        return number

    def _take(self, number: int) -> None:
        thread = thread_name()
        self._makers[number] = thread
        self.note(Take(thread, self.current_stream().name, number))

    def _freed(self, number: int) -> None:
        self.note(Free(number))

    def _span(self, tensor: torch.Tensor) -> Span | None:
        if tensor.device.type != "cpu" or not tensor.numel() or not tensor.untyped_storage().nbytes():
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
                    self._take(self._number(storage))
        return resize(storage, nbytes)

    def submitted(self, pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, submit: Any) -> Future[Any]:
        """In place of `ThreadPoolExecutor.submit`: both ways order the threads."""
        begin, end = StandInEvent(self, thread_name()), []

        def run() -> Any:
            self.note(Wait(thread_name(), thread_name(), begin.number))
            try:
                with self:
                    return work(*args)
            finally:
                end.append(StandInEvent(self, thread_name()))

        future = submit(pool, run)
        result = future.result

        def joined(timeout: float | None = None) -> Any:
            value = result(timeout)
            self.note(Wait(thread_name(), thread_name(), end[0].number))
            return value

        future.result = joined
        return future

    def collective(self, kind: str, run: Callable[..., None], out: torch.Tensor, own: torch.Tensor, **more: Any) -> Any:
        """In place of a collective of the backend, which has a stream for each kind."""
        thread, stream = thread_name(), f"backend's {kind}"
        self.note(Wait(thread, stream, self.current_stream().record_event().number))
        with self.quiet():
            run(out, own, more["group"])
        with self.stream(StandInStream(self, stream)):
            self.launch(kind, [own], [out])
        return StandInWork(self, StandInEvent(self, stream), out, own)

    def requested(self, aio: Aio, write: bool, file: Any, tensor: torch.Tensor, offset: int, begin: Any) -> Request:
        """In place of `Aio._begin`: a stream for each request, as they have no order."""
        request = begin(aio, write, file, tensor, offset)
        with self.stream(StandInStream(self, f"request {next(self.numbers)}")):
            spans = (self._span(tensor),), (Span(-file.fd, offset, offset + tensor.nbytes),)
            thread, stream = thread_name(), self.current_stream().name
            self.note(Launch(thread, stream, f"request ({site()})", *(spans if write else spans[::-1])))
            request.end = self.current_stream().record_event()
        return request

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, this thread notes no operations."""
        self._here.quiet = True
        try:
            yield
        finally:
            self._here.quiet = False

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Engines made inside have streams, memory of their own, and NCCL where there are several ranks."""

        def keep(tensor: torch.Tensor, stream: StandInStream) -> None:
            self.note(Keep(self._buffer(tensor), stream.name, site()))

        def arena(this: PinnedArena, *args: Any, made: Any = PinnedArena.__init__, **more: Any) -> None:
            made(this, *args, **more)
            self._arenas.append((this.address, this.address + this.nbytes))

        def reserve(*args: Any, taken: Any = StagingBuffers.reserve) -> torch.Tensor:
            place = taken(*args)
            self._hosts.add(self._buffer(place))
            return place

        def read(tensor: torch.Tensor, tolist: Any = torch.Tensor.tolist) -> Any:
            by = site()
            if by == "outcome.numbers":  # what was sent to the host: reading it waits for nothing
                self.note(Launch(thread_name(), None, f"tolist ({by})", tuple(filter(None, (self._span(tensor),)))))
            else:
                self.launch("tolist", [tensor], [], blocks=True)
            return tolist(tensor)

        def squares(part: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(part.double().square().sum())

        def waited(request: Request, wait: Any = Request.wait) -> None:
            wait(request)
            request.end.synchronize()

        def in_place(place: Any, name: str, ours: Callable[..., Any], **more: Any) -> None:
            patch.setattr(place, name, lambda *args, **rest: ours(*args, **more, **rest))

        with pytest.MonkeyPatch.context() as patch, as_on_a_gpu():
            patch.setattr(zero.memory.streams, "streams_of", lambda device: self)
            patch.setattr(native, "_find", lambda name: (None, None))
            native.load.cache_clear()
            patch.setattr(cuda, "reads_wait", lambda device: True)
            patch.setattr(zero.optim.norm, "sum_squares_into", squares)
            in_place(torch.Tensor, "record_stream", keep)
            in_place(torch.Tensor, "tolist", read)
            in_place(PinnedArena, "__init__", arena)
            in_place(StagingBuffers, "reserve", reserve)
            in_place(Request, "wait", waited)
            in_place(Aio, "_begin", self.requested, begin=Aio._begin)
            in_place(torch.UntypedStorage, "resize_", self.resized, resize=torch.UntypedStorage.resize_)
            in_place(ThreadPoolExecutor, "submit", self.submitted, submit=ThreadPoolExecutor.submit)
            patch.setattr(zero.core.mesh, "backend_of", lambda group, device: "nccl")
            patch.setattr(zero.core.comm, "_all_gather", partial(self.collective, "gather", gather))
            patch.setattr(zero.core.comm, "_reduce_scatter", partial(self.collective, "reduction", scatter))
            patch.setattr(dist, "all_to_all_single", partial(self.collective, "reduction", exchange))
            try:
                yield
            finally:
                native.load.cache_clear()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """What is done inside becomes the program."""
        self._on = True
        try:
            with self:
                yield
        finally:
            self._on = False
            # The allocator of the device has nothing to do with memory of the host.
            others = {id(each) for each in self.program if isinstance(each, Take | Free) and each.buffer in self._hosts}
            self.program = [each for each in self.program if id(each) not in others]


def gather(out: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Of every rank's `own` into `out`."""
    parts = list(torch.empty_like(out).chunk(dist.get_world_size(group)))
    dist.all_gather(parts, own.clone(), group=group)
    out.copy_(torch.cat(parts))


def scatter(out: torch.Tensor, flat: torch.Tensor, group: Any) -> None:
    """The sum of every rank's part for us, in the order of ranks."""
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, flat.clone(), group=group)
    rows = [part.chunk(len(parts))[dist.get_rank(group)].float() for part in parts]
    out.copy_(sum(rows[1:], rows[0]))


def exchange(out: torch.Tensor, flat: torch.Tensor, group: Any) -> None:
    """Every rank's part for us."""
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, flat.clone(), group=group)
    out.copy_(torch.cat([part.chunk(len(parts))[dist.get_rank(group)] for part in parts]))
