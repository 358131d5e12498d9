"""FLOPs of a model by module, counted by torch in one step, and timed in the next (`flops_profiler`)."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zero.config.monitor_sections import FlopsProfiler
from zero.core.torch_private import backward_task
from zero.log import logger
from zero.monitor.module_calls import ModuleCalls, Stamp, now, seconds


@dataclass
class Row:
    """One module with everything inside: FLOPs and seconds of its forward passes in a step, over all micro-batches.

    called: its own forward ran; otherwise, as for a ModuleList, it has the sums of the modules inside.
    """

    path: str
    kind: str
    params: int
    called: bool = False
    forward: int = 0
    seconds: float = 0.0

    @property
    def depth(self) -> int:
        """How many modules contain it."""
        return self.path.count(".") + 1 if self.path else 0


class FlopsProfile:
    """The section `flops_profiler` on one rank: one step is counted, the next one timed; then the table is written.

    FLOPs are those of `torch.utils.flop_counter`: 2mkn for a product of [m, k] and [k, n], attention and convolutions.

    rows:       by path in the model, the root first;
    forward:    FLOPs of forward passes with gradients; recomputed: of forwards in a backward; apart: of forward
                passes without gradients; total: all of the step, backward passes included.
    """

    def __init__(
        self,
        section: FlopsProfiler,
        module: nn.Module,
        device: torch.device,
        peak: Callable[[], float],
        formulas: Mapping[Any, Callable[..., int]],
    ) -> None:
        """`peak`: returns the device's peak FLOP/s; `formulas`: of operators without one in torch."""
        self._formulas = dict(formulas)
        self.forward = self.recomputed = self.apart = self.total = 0
        self.rows: dict[str, Row] = {}
        self._section, self._module, self._device, self._peak = section, module, device, functools.cache(peak)
        for path, each in module.named_modules():
            self.rows[path] = Row(path, type(each).__name__, sum(param.numel() for param in each.parameters()))
        self._calls = ModuleCalls()
        self._counter: FlopCounterMode | None = None
        self._counted = 0  # which step
        self._open = 0  # forward passes that run
        self._timed: list[tuple[Row, Stamp, Stamp]] = []
        self._todo = ["count", "time", "print"]

    def mfu(self, took: float) -> float | None:
        """The fraction of the device's peak that a step of `took` seconds reaches (PaLM, appendix B); None before it is
        known. Recomputation does not count.
        """
        return self.model / took / self._peak() if self.total else None

    @property
    def backward(self) -> int:
        """FLOPs of the gradients alone."""
        return self.total - self.forward - self.recomputed - self.apart

    @property
    def model(self) -> int:
        """FLOPs that one step of the model takes on this rank."""
        return self.forward + self.backward

    def step_ended(self, step: int, took: float) -> None:
        """Record the end of the step with this number, 0 at the start, after `took` seconds."""
        if not self._todo or step < self._section.profile_step:
            return
        todo = self._todo.pop(0)
        self._stop()
        if todo == "print":
            self._print(took)
            return
        if todo == "count":
            self._counted = step + 1
            self._counter = FlopCounterMode(display=False, custom_mapping=self._formulas)
            self._counter.__enter__()
        for path, row in self.rows.items():
            self._calls.watch(self._module.get_submodule(path), functools.partial(self._following, row))

    def close(self) -> None:
        """End the run; writes the table if it was not written yet."""
        self._stop()
        if self._todo == ["print"]:
            self._print(0.0)

    def _stop(self) -> None:
        self._calls.end()
        if self._counter is not None:
            self.total = self._counter.get_total_flops()
            self._counter.__exit__(None, None, None)
            self._counter = None
        for row, start, end in self._timed:
            if not isinstance(end, float):
                end.synchronize()
            row.seconds += seconds(start, end)
        self._timed = []

    @contextlib.contextmanager
    def _following(self, row: Row) -> Iterator[None]:
        row.called = True
        counter, self._open = self._counter, self._open + 1
        before, start = counter.get_total_flops() if counter is not None else 0, now(self._device)
        try:
            yield
        finally:
            self._open -= 1
            kind = "recomputed" if backward_task() >= 0 else "forward" if torch.is_grad_enabled() else "apart"
            if counter is None and kind == "forward":
                self._timed.append((row, start, now(self._device)))
            elif counter is not None:
                flops = counter.get_total_flops() - before
                row.forward += flops if kind == "forward" else 0
                if not self._open:  # the outermost
                    setattr(self, kind, getattr(self, kind) + flops)

    def _print(self, took: float) -> None:
        for row in reversed(self.rows.values()):  # a module comes before those inside it
            above = self.rows[row.path.rpartition(".")[0]]
            if row.path and not above.called:
                above.forward, above.seconds = above.forward + row.forward, above.seconds + row.seconds
        text, file = "\n".join(self._lines(took)), self._section.output_file
        if file is None or not written(Path(file), text):
            logger.info("%s", text)

    def _lines(self, took: float) -> Iterator[str]:
        yield f"FLOPs of step {self._counted} on this rank, and times of the next one"
        recomputed = f", recomputed {si(self.recomputed)}FLOP" if self.recomputed else ""
        yield f"forward {si(self.forward)}FLOP, backward {si(self.backward)}FLOP{recomputed}"
        if took:
            reached = f"{si(self.model / took)}FLOP/s, MFU {self.mfu(took):.1%} of {si(self._peak())}FLOP/s"
            yield f"{1e3 * took:,.1f} ms/step: {reached}"
        yield f"{'module':<44} {'parameters':>14} {'forward FLOP':>13} {'share':>6} {'ms':>9} {'FLOP/s':>9}"
        largest: dict[int, list[Row]] = {}
        for row in sorted(self.rows.values(), key=lambda row: -row.forward):
            largest.setdefault(row.depth, []).append(row)
        for row in self.rows.values():
            deep = 0 <= self._section.module_depth < row.depth
            if not deep and (self._section.detailed or row in largest[row.depth][: self._section.top_modules]):
                name = "  " * row.depth + (f"{row.path.rpartition('.')[2]} ({row.kind})" if row.path else row.kind)
                share = row.forward / max(1, self.forward)
                times = f"{1e3 * row.seconds:>9,.2f} {si(row.forward / row.seconds):>9}" if row.seconds else ""
                yield f"{name:<44} {row.params:>14,} {si(row.forward):>13} {share:>6.0%} {times}".rstrip()


def written(path: Path, text: str) -> bool:
    """Write a file, and make its folders; a failure is only a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("the profile '%s' could not be written: %s", path, error)
        return False
    return True


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int = 1024) -> float:
    """FLOP/s of a product of two [size, size] on this device now, the fastest of five."""
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        (left @ right)[0, 0].item()  # waits for a GPU
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def si(number: float) -> str:
    """The number as in "1.23 G", to be followed by a unit."""
    prefixes = " kMGTP"
    power = min(int(math.log10(max(1, number)) // 3), len(prefixes) - 1)
    return f"{number / 1000**power:.3g} {prefixes[power].strip()}"
