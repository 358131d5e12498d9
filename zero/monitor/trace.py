"""The steps of `zero.profile`: a trace by torch's profiler, a summary, and the timeline of one step for the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from zero.config.monitor_sections import Profile
from zero.core.sharded_module import ShardedModule
from zero.core.torch_private import all_threads, profiler_runs
from zero.log import logger
from zero.monitor.flops import written
from zero.monitor.timeline import GPU, KINDS, MESSAGES, Timeline, TimeSpan, exposed, kernel_spans, summary

EARLY = (5, 5)  # the steps of a report's timeline if none are given
_MARK = "zero: begin"


class StepTrace:
    """Records some steps of one rank, from the end of the step before the first of them.

    For a report without `steps` it is one early step: on a CPU with two clock readings per operation, on a GPU
    with torch's profiler, too.
    """

    def __init__(
        self, section: Profile, sharded: ShardedModule, tell: Callable[[Mapping[str, Any]], None] | None
    ) -> None:
        """`tell`: takes {"step", "spans"} of one step, for the report; None without a report."""
        self._rank = rank = sharded.world.global_rank
        self._traced = section.steps is not None and (section.ranks is None or rank in section.ranks)
        self._first, self._last = section.steps or EARLY
        self._on = self._traced or (section.steps is None and tell is not None)
        self._folder, self._tell = Path(section.dir), tell
        self._sharded = sharded
        self._timeline: Timeline | None = None
        self._profiler: profile | None = None
        self._ends: list[float] = []  # ends of the steps; the first is the beginning
        self._marked = 0.0

    def step_ended(self, step: int) -> None:
        """Record the end of the step with this number, 0 at the start."""
        if self._timeline is not None:
            self._ends.append(time.perf_counter())
            if step >= self._last:
                self.close()
        elif self._on and self._first - 1 <= step < self._last:
            self._first = step + 1
            self._start()

    def close(self) -> None:
        """End a running recording, and write its whole steps."""
        if self._timeline is None:
            return
        spans, self._timeline, self._on = self._timeline.stop(), None, False
        if self._profiler is not None:
            self._profiler.stop()
            if self._sharded.device.type == "cuda":  # reading the events takes a while
                events = self._profiler.events()
                mark = next(event.time_range.start for event in events if event.name == _MARK)
                spans += kernel_spans(events, self._marked - mark / 1e6)
        if self._traced and len(self._ends) > 1:
            self._write(spans)
        if self._tell is not None and len(self._ends) > 1:
            begin, end = self._ends[:2]
            rows = [[*each[:2], each.start - begin, each.end - begin] for each in spans if begin < each.end <= end]
            self._tell({"step": self._first, "spans": sorted(rows, key=lambda row: row[2])})
        self._profiler = None

    def _start(self) -> None:
        on_gpu = self._sharded.device.type == "cuda"
        if self._traced or on_gpu:
            if profiler_runs():
                logger.warning("no trace of step %d: the script has a profiler of its own running", self._first)
                self._on = False
                return
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
            self._profiler = profile(activities=activities, experimental_config=all_threads())
            self._profiler.start()
            with record_function(_MARK):
                self._marked = time.perf_counter()
        self._timeline = Timeline(self._sharded, self._traced)
        self._ends = [time.perf_counter()]

    def _write(self, spans: Sequence[TimeSpan]) -> None:
        steps = len(self._ends) - 1
        kinds = [*dict.fromkeys(KINDS.values()), "other"]  # in milliseconds per step of each stream
        whole = f"{1e3 * (self._ends[-1] - self._ends[0]) / steps:,.2f} ms/step"
        lines = [f"steps {self._first} to {self._first + steps - 1} on rank {self._rank}"]
        lines.append(f"{whole:<20} " + " ".join(f"{kind:>9}" for kind in kinds))
        for stream, of_kind in summary(spans).items():
            figures = " ".join(f"{1e3 * of_kind.get(kind, 0.0) / steps:>9,.2f}" for kind in kinds)
            lines.append(f"{stream:<20} {figures}" + "  until they were waited for" * (stream == MESSAGES))
        if on_gpu := [span for span in spans if span.stream.startswith(GPU)]:
            lines.append(f"the GPU waits {1e3 * exposed(on_gpu) / steps:,.2f} ms/step for what travels")
        text = "\n".join(lines)
        if written(self._folder / f"rank-{self._rank}.summary.txt", text):
            self._profiler.export_chrome_trace(str(self._folder / f"rank-{self._rank}.trace.json"))
        if self._rank == 0:
            logger.info("%s", text)
