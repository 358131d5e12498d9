"""DeepSpeed's timers of an engine, for what a script times and counts: no phase of the engine, and they end no run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import torch

from zero.log import rank_zero


class Timer:
    """Adds up what lies between `start` and `stop`. A call that does not fit changes nothing: it never ends a run."""

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        self._since: float | None = None

    def start(self) -> None:
        """Begin, once the device has done what it was given."""
        self._since = _now()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Count what has passed since `start`, alone with `reset`; `record` is taken: all are in the mean."""
        if self._since is not None:
            if reset:
                self.reset()
            self.seconds, self.count = self.seconds + _now() - self._since, self.count + 1
            self._since = None

    def reset(self) -> None:
        """Begin again from 0; what runs goes on."""
        self.seconds, self.count = 0.0, 0

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds so far."""
        found = 1e3 * self.seconds
        if reset:
            self.reset()
        return found

    def mean(self) -> float:
        """Milliseconds of one `start` and `stop`."""
        return 1e3 * self.seconds / max(1, self.count)


class SynchronizedWallClockTimer:
    """Timers by name: `timers("name").start()`."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """The timer of that name, made when it is first asked for."""
        return self.timers.setdefault(name, Timer())

    def get_timers(self) -> dict[str, Timer]:
        """All that there are, by name."""
        return self.timers

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Milliseconds of one call of each, over `normalizer`; names that were never timed are left out."""
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in means if reset else ():
            self.timers[name].reset()
        return means

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Log on rank 0 the milliseconds of each; `memory_breakdown` and `ranks` are taken, without effect."""
        found = {name: self.timers[name].elapsed(reset) / normalizer for name in names if name in self.timers}
        rank_zero(logging.INFO, "time (ms) | %s", " | ".join(f"{name}: {each:.2f}" for name, each in found.items()))


class ThroughputTimer(Timer):
    """Counts epochs, and the steps of `batch_size` samples that lie between `start` and `stop`."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.epoch_count = self.micro_step_count = self.global_step_count = 0

    def update_epoch_count(self) -> None:
        """An epoch has ended."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def stop(self, global_step: bool = False, report_speed: bool = True, sync: bool = True) -> None:
        """A micro-batch has ended, and with `global_step` the step; `report_speed` logs samples per second then."""
        if self._since is not None:
            self.micro_step_count += 1
            self.global_step_count += global_step
        super().stop()
        if global_step and report_speed:
            rank_zero(logging.INFO, "%.5g samples/s by the script's own timer", self.avg_samples_per_sec())

    def avg_samples_per_sec(self) -> float:
        """Samples of all ranks per second of what was timed; 0 before the first step."""
        return self.batch_size * self.global_step_count / self.seconds if self.seconds else 0.0


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
