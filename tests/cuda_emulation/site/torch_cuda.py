"""What torch.cuda is where a stand-in is the one GPU: what zero and its tests call, no more.

Streams are those that are passed in; random numbers are the CPU's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

NAME = "stand-in for CUDA"
MEMORY = 1 << 34  # bytes


class Event:
    """Of a stream on which all is done when it is asked for."""

    def __init__(self, **options: Any) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)

    def query(self) -> bool:
        return True

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """As torch.cuda.Stream, with events of `event`."""

    cuda_stream = 0
    event: Callable[[], Any] = Event

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority = torch.device("cuda", 0), priority

    def record_event(self, event: Any = None) -> Any:
        event = event or self.event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Device(contextlib.nullcontext):
    """A class, since torch asks whether something is one of these."""


def functions(of: type[Stream] = Stream) -> dict[str, Any]:
    """Functions and classes of torch.cuda, by name; its streams are `of` these."""
    first, of_thread = of(), threading.local()

    def current(device: Any = None) -> Stream:
        return getattr(of_thread, "stream", first)

    @contextlib.contextmanager
    def entered(stream: Stream | None) -> Iterator[None]:
        before, of_thread.stream = current(), stream or current()
        try:
            yield
        finally:
            of_thread.stream = before

    def always(value: Any) -> Callable[..., Any]:  # each a function of its own, as torch._dynamo wants
        return lambda *args, **kwargs: value

    yes = ("is_available", "is_initialized", "is_bf16_supported")
    done = ("_lazy_init", "init", "empty_cache", "set_device", "reset_peak_memory_stats")
    done += ("manual_seed", "manual_seed_all", "set_per_process_memory_fraction")
    none = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved")
    return {
        **{name: always(True) for name in yes},
        **{name: always(None) for name in done},
        **{name: always(0) for name in none},
        "device_count": always(1),
        "synchronize": lambda device=None: first.synchronize(),
        "current_stream": current,
        "default_stream": always(first),
        "stream": entered,
        "device": Device,
        "Stream": of,
        "Event": of.event,
        "get_device_name": always(NAME),
        "get_device_capability": always((0, 0)),
        "get_device_properties": always(SimpleNamespace(name=NAME, total_memory=MEMORY)),
        "mem_get_info": always((MEMORY, MEMORY)),
        "default_generators": (torch.default_generator,),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
