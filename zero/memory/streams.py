"""The streams of a GPU beside the one that computes, and the events between them; no other module makes either.

Two streams are ordered only if one waits for an event of the other. So each user of a buffer waits for the event of its
producer, and before memory is freed, its pool's stream waits for the events of all users: torch's allocator reuses
memory in the order of the stream that was current when it was allocated, whatever other streams do with it, and it does
not know our host memory (`PinnedArena`). The training loop's current stream is called "compute" here; what hooks do on
the streams of parts of a model, and other threads, they do on compute (`entered`, `joined`). In `Unit.send`
and `Gradients.reduce` a side stream begins after all work that compute has queued; compute continues after it in
`Unit.wait`, `Gradients.advance` and `Gradients.finish`.

    buffer                    pool of       used besides by        ordered by
    full parameters           compute       gathers, messages      `send` after it is taken; `wait` before it is freed
    8 bits of all ranks       compute       gathers, messages      `send` after they are taken; `wait` before the free
    shard on the device       compute       gathers (read)         `send`; `wait`
                                            up (write)             `ready` of the step; `Shard.settle`
    shard on the host         none          gathers (read)         `Shard.wait_copies` before the host writes
    local gradient, as sent   compute       reductions, messages   `reduce` when it is full; `advance` before the free
    messages in, sums         reductions    compute (read)         `finish`; the next `reduce` before they are reused
    a sum that leaves         reductions    down (read)            `after_current`; kept by `record_stream`
    a sum that `up` uses up   reductions    up (read)              `ready` of the step; kept by `record_stream`
    gradient on the host      none          down (write)           `HostGradAccumulator.wait` before the host reads
    a slot for what streams   compute       up, down               `Slot.free`; kept by `record_stream`
    what streams, at rest     none          up (read)              `StreamedStore._last`; the host waits before a drive
                                            down (write)           writes it, and in `StreamedStore.close`
    inputs of recomputation   compute       copies of their own    `after_current`; kept by `record_stream`

tests/core/test_stream_order.py checks this on recorded steps. No device memory is cached here: the allocator
caches freed memory by stream and size, and each step takes the same sizes (tests/core/test_steady_memory.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch


def streams_of(device: torch.device) -> Any | None:
    """torch's stream module for a device; None if each call returns only when its work is complete."""
    return torch.cuda if device.type == "cuda" else None


class Event:
    """After all work that `stream` has queued so far.

    CUDA's event behind it is used again when nobody holds this any more, so that steps that repeat make none: what
    waits on the device waits for what was recorded when the wait was queued.
    """

    _unused: ClassVar[dict[Any, list[Any]]] = {}  # by the device, and torch's class

    def __init__(self, stream: Any) -> None:
        made_by = streams_of(stream.device).Event
        self.stream, self._pool = stream, self._unused.setdefault((made_by, stream.device), [])
        try:
            self.recorded = self._pool.pop()
        except IndexError:
            self.recorded = made_by()
        self.recorded.record(stream)

    def __del__(self) -> None:
        self._pool.append(self.recorded)

    def query(self) -> bool:
        """Whether the stream has passed it."""
        return self.recorded.query()

    def synchronize(self) -> None:
        """Block until the stream has passed it."""
        self.recorded.synchronize()


class SideStream:
    """Work of one kind, in order, beside the stream that computes; without a GPU, at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, of = device, streams_of(device)
        # Of high priority: other streams wait for this work, so it goes before computation.
        self._stream = None if of is None else of.Stream(device, priority=-1)

    @contextlib.contextmanager
    def after_current(self) -> Iterator[None]:
        """Work queued inside runs on this stream, after all work that the current stream has queued so far."""
        self.wait(record_event(self._device))
        with entered(self._stream):
            yield

    @contextlib.contextmanager
    def before_current(self) -> Iterator[None]:
        """Work queued inside runs on this stream; work that the current stream queues later runs after it."""
        with entered(self._stream):
            yield
        wait_event(self.record_event(), self._device)

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Work queued inside runs on this stream, after its earlier work."""
        return entered(self._stream)

    def wait(self, event: Event | None) -> None:
        """Make this stream wait for `event`, if there is one."""
        if event is not None:
            self._stream.wait_event(event.recorded)

    def record_event(self) -> Event | None:
        """An event after all work queued on this stream; None without a GPU."""
        return None if self._stream is None else Event(self._stream)

    def synchronize(self) -> None:
        """Wait until all work queued on this stream is complete."""
        if self._stream is not None:
            self._stream.synchronize()

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a device tensor from being reused before this stream has finished with it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


class Streams(NamedTuple):
    """The side streams of one engine.

    gathers:    messages of parameters, and the copies that fill their buffers;
    reductions: messages of gradients, and their sums;
    up, down:   copies of updated values from the host, and of gradients to the host; for streamed state
                also its copies, and its updates on `up`.
    """

    gathers: SideStream
    reductions: SideStream
    up: SideStream
    down: SideStream

    @classmethod
    def create(cls, device: torch.device) -> Streams:
        """New streams of `device`, next to the one that computes."""
        return cls(*(SideStream(device) for _ in cls._fields))


def current_stream(device: torch.device) -> Any | None:
    """The one on which this thread queues work of `device` now; None without a GPU."""
    of = streams_of(device)
    return None if of is None else of.current_stream(device)


def entered(stream: Any | None) -> contextlib.AbstractContextManager[Any]:
    """Inside, this thread queues its work on `stream`, if there is one; that of a new thread would be the default one.

    Memory is reused in the order of the stream on which it was taken.
    """
    return contextlib.nullcontext() if stream is None else streams_of(stream.device).stream(stream)


@contextlib.contextmanager
def joined(stream: Any | None, *read: torch.Tensor) -> Iterator[None]:
    """Inside, this thread queues its work on `stream`, after all of its current one, whose tensors are `read` there.

    For hooks: autograd runs them on the stream of their part of the model, and parts may have several.
    """
    if stream is None or (now := current_stream(stream.device)) == stream:
        yield
        return
    stream.wait_event(Event(now).recorded)
    for each in read:
        each.record_stream(stream)
    with entered(stream):
        yield


def record_event(device: torch.device) -> Event | None:
    """An event after all work that the current stream of `device` has queued; None without a GPU."""
    stream = current_stream(device)
    return None if stream is None else Event(stream)


def wait_event(event: Event | None, device: torch.device) -> None:
    """Make the current stream of `device` wait for `event`, if there is one."""
    if event is not None:
        current_stream(device).wait_event(event.recorded)


def synchronize(device: torch.device) -> None:
    """Wait until all work that the current stream of `device` has queued is complete."""
    event = record_event(device)
    if event is not None:
        event.synchronize()
