"""The log of a run's steps on rank 0: a line every so many steps, and one at the end."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch

from zero.config import Config
from zero.log import counted, logger
from zero.monitor.step_record import StepRecord
from zero.plan.memory import MIB


@dataclass
class _Totals:
    """Sums of the records of optimizer steps. since: the time.perf_counter() at which the first began."""

    since: float | None = None
    steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    tokens: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.seconds += record.seconds
        self.samples += record.samples
        self.tokens += record.tokens
        self.add_times(record.phases, record.waiting)

    def add_times(self, phases: Mapping[str, float], waiting: Mapping[str, float]) -> None:
        for sums, times in ((self.phases, phases), (self.waiting, waiting)):
            for name, seconds in times.items():
                sums[name] = sums.get(name, 0.0) + seconds

    def shares(self, whole: float) -> str:
        """The phases in percent of `whole` seconds, and what is left of it, as the loading of data."""
        phases = self.phases | {"other": max(0.0, whole - sum(self.phases.values()))}
        texts = [
            ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in each.items())
            for each in (phases, self.waiting)
        ]
        return texts[0] + (f" (waiting for {texts[1]})" if self.waiting else "")


class Printer:
    """Writes the log as `steps_per_print` and `wall_clock_breakdown` of the JSON say, from the records of steps."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._device = config, device
        self._recent, self._all = _Totals(), _Totals()  # since the last line, and since the first forward
        self._logged: dict[str, Any] = {}
        self._end = weakref.finalize(self, _log_end, self._all)  # at the end of the process, if not before

    def begin(self, at: float) -> None:
        """The first forward begins."""
        self._all.since = at

    def keep(self, values: Mapping[str, Any]) -> None:
        """Show these, each the latest of its name, at the end of the line of a step."""
        self._logged |= values

    def step(self, record: StepRecord) -> bool:
        """Log a step, if it is its turn; whether it was."""
        self._recent.add(record)
        self._all.add(record)
        if record.step % int(self._config.steps_per_print) or not logger.isEnabledFor(logging.INFO):
            return False
        logger.info("%s", " | ".join(self._parts(record)))
        self._recent = _Totals()
        return True

    def end(self, phases: Mapping[str, float], waiting: Mapping[str, float]) -> None:
        """Log the whole run in one line; once, and by itself where the program ends without asking for it.

        phases, waiting: what came behind the last step.
        """
        self._all.add_times(phases, waiting)
        self._end()

    def _parts(self, record: StepRecord) -> list[str]:
        """Of the line of a step: those that there are."""
        recent = self._recent
        done, what = (recent.tokens, "tokens") if recent.tokens else (recent.samples, "samples")
        rates, (kind, nbytes) = sorted(record.lr), memory(self._device)
        parts = {
            f"step {record.step}": True,
            f"loss {record.loss or 0:.4g}": record.loss is not None,
            f"norm {record.norm:.3g}": True,
            f"lr {' to '.join(f'{lr:.3g}' for lr in dict.fromkeys(rates[:1] + rates[-1:]))}": bool(rates),
            f"loss scale {record.scale or 0:g}": record.scale is not None,
            f"skipped {record.skipped_steps}": record.skipped_steps > 0,
            f"loss not finite {record.not_finite}": record.not_finite > 0,
            f"{_short(done / recent.seconds)} {what}/s": True,
            f"{_short(1e3 * recent.seconds / recent.steps)} ms/step": True,
            f"{kind} {_bytes(nbytes)}": True,
            recent.shares(recent.seconds): self._config.wall_clock_breakdown,
        }
        read = {name: one.item() if isinstance(one, torch.Tensor) else one for name, one in self._logged.items()}
        logged = [f"{name}={one:.5g}" if isinstance(one, float) else f"{name}={one}" for name, one in read.items()]
        return [*(text for text, there in parts.items() if there), *logged]


def memory(device: torch.device) -> tuple[str, int]:
    """Kind and bytes of the most that the GPU held so far, or of what the process holds of the machine's memory now."""
    if device.type == "cuda":
        return "GPU memory", torch.cuda.max_memory_allocated(device)
    return "memory", psutil.Process().memory_info().rss


def in_mib(nbytes: Mapping[str, int]) -> str:
    """Bytes by kind, in MiB."""
    return " | ".join(f"{name}: {each / MIB:.1f}" for name, each in nbytes.items())


def _log_end(totals: _Totals) -> None:
    if not totals.steps:
        return
    seconds = time.perf_counter() - totals.since
    shares = f": {totals.shares(seconds)}" if totals.phases else ""
    took = f"{seconds:.1f} s" if seconds < 600 else str(timedelta(seconds=round(seconds)))
    logger.info("%s", f"{counted(totals.steps, 'step')}, {counted(totals.samples, 'sample')} in {took}{shares}")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f} MiB" if nbytes < 10 * 1024 * MIB else f"{nbytes / MIB / 1024:,.1f} GiB"
