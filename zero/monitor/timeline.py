"""A rank's step as spans of time: computation, work on each unit, waits."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from zero.core.sharded_module import ShardedModule
from zero.core.torch_private import backward_task
from zero.monitor.module_calls import ModuleCalls, Stamp
from zero.watchdog.rank_status import Collective

MESSAGES = "messages"  # the stream of collectives, each from its begin until a wait for it ended
GPU = "GPU stream"
# The first word of a span's name, and its kind in the summary.
KINDS = {
    **dict.fromkeys(("forward", "backward", "recompute", "kernels"), "compute"),
    "gather": "gather",
    **dict.fromkeys(("reduce", "sum", "replica"), "reduce"),
    **dict.fromkeys(("update", "step"), "update"),
    **dict.fromkeys(("copy", "write"), "transfer"),
    "wait": "waits",
}


class TimeSpan(NamedTuple):
    """The work of one stream (a thread, the messages, a stream of a GPU) from `start` to `end`, in seconds."""

    stream: str
    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """Its kind in the summary."""
        return KINDS.get(self.name.partition(" ")[0], "other")


class Timeline:
    """Records the spans of one engine on this rank, in time.perf_counter(), until `stop`.

    spans: in the order of their ends.
    """

    def __init__(self, sharded: ShardedModule, traced: bool) -> None:
        """`traced`: also name them in the trace of torch's running profiler."""
        self.spans: list[TimeSpan] = []
        self._traced = traced
        self._calls = ModuleCalls()
        self._end = sharded.world.watchdog.events.subscribe(self._work, self._waited)
        for name in {unit.plan.anchor for unit in sharded.units} - {""}:
            self._calls.watch(sharded.module.get_submodule(name), functools.partial(self._pass, name))

    def stop(self) -> list[TimeSpan]:
        """Stop recording; returns the spans."""
        self._end()
        self._calls.end()
        return self.spans

    @contextlib.contextmanager
    def _span(self, name: str) -> Iterator[None]:
        with record_function(f"zero: {name}") if self._traced else contextlib.nullcontext():
            start = time.perf_counter()
            try:
                yield
            finally:
                self.spans.append(TimeSpan(threading.current_thread().name, name, start, time.perf_counter()))

    def _work(self, verb: str, unit: str) -> contextlib.AbstractContextManager[None]:
        return self._span(f"{verb} {unit}".strip())

    def _pass(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._span(f"{'forward' if backward_task() < 0 else 'recompute'} {name}")

    def _waited(self, collective: Collective, begun: Stamp, start: Stamp, end: Stamp) -> None:
        if isinstance(end, float):  # else the GPU's streams show it
            name = f"{collective.direction} {collective.unit}".strip()
            self.spans.append(TimeSpan(threading.current_thread().name, f"wait {name}", start, end))
            self.spans.append(TimeSpan(MESSAGES, name, begun, end))


def kernel_spans(events: Iterable[Any], later: float, gap: float = 20e-6) -> list[TimeSpan]:
    """The spans of a GPU's streams from the events of torch's profiler, whose clock is `later` seconds behind.

    Neighbours of one kind on a stream are one span if less than `gap` seconds are between them.
    """
    spans: list[TimeSpan] = []
    last: dict[str, int] = {}  # by stream, the index of its last span
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.device_type == torch.autograd.DeviceType.CUDA:
            start, end = (moment / 1e6 + later for moment in (event.time_range.start, event.time_range.end))
            span = TimeSpan(f"{GPU} {event.device_resource_id}", _kernel(event.name), start, end)
            before = spans[last[span.stream]] if span.stream in last else None
            if before is not None and before.name == span.name and start - before.end < gap:
                spans[last[span.stream]] = before._replace(end=max(end, before.end))
            else:
                last[span.stream] = len(spans)
                spans.append(span)
    return spans


def _kernel(name: str) -> str:
    if "nccl" in name:
        return "gather" if "AllGather" in name else "reduce"
    return "copy" if name.startswith(("Memcpy HtoD", "Memcpy DtoH")) else "kernels"


def summary(spans: Sequence[TimeSpan]) -> dict[str, dict[str, float]]:
    """Seconds by stream and kind. The time of a span inside another span of its stream is subtracted from that one."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    inside: dict[str, list[TimeSpan]] = defaultdict(list)  # open spans, the innermost last
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        outer = inside[span.stream]
        while outer and outer[-1].end <= span.start:
            outer.pop()
        sums[span.stream][span.kind] += span.end - span.start
        if outer and span.stream != MESSAGES:  # messages overlap
            sums[span.stream][outer[-1].kind] -= span.end - span.start
        outer.append(span)
    return sums


def exposed(spans: Sequence[TimeSpan]) -> float:
    """Seconds in which the streams of a GPU gather, reduce or copy and none computes."""
    edges = [(at, span.kind == "compute", step) for span in spans for at, step in ((span.start, 1), (span.end, -1))]
    total, since, running = 0.0, 0.0, [0, 0]  # counts of other and of computing spans
    for at, computes, step in sorted(edges):
        total += at - since if running[0] and not running[1] else 0.0
        since = at
        running[computes] += step
    return total
