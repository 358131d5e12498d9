"""What the engine says while it runs: a line at the start, one every so many steps, and on request where time goes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import torch

from zero.config import Config
from zero.core.sharded_module import ShardedModule
from zero.kernels import cuda
from zero.kernels.native import isa
from zero.log import logger
from zero.plan.formats import Formats
from zero.plan.host import HostBytes
from zero.plan.memory import StateBytes

MIB = 2**20
_WAITS = "of that waiting for updates"  # the last in its line


class Progress:
    """Prints on rank 0: `steps_per_print`, `wall_clock_breakdown` and `memory_breakdown` of the JSON."""

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        self._every = config.steps_per_print if rank == 0 else math.inf
        self._memory = config.memory_breakdown
        self._clock = config.wall_clock_breakdown
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside towards `name`, if asked to; a GPU is waited for at both ends then, which costs."""
        if not self._clock:
            yield
            return
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def waited(self, seconds: float | None) -> None:
        """Part of the time of the phases was spent waiting for updates in host memory; None: there are none."""
        if seconds is not None and self._clock:
            self._seconds[_WAITS] = self._seconds.pop(_WAITS, 0.0) + seconds

    def step(
        self,
        number: int,
        skipped: int,
        lr: list[float],
        mom: list[object],
        held: Callable[[], StateBytes],
        off: HostBytes | None = None,
    ) -> None:
        """Optimizer step `number` is done; say so if it is its turn. `off`: what rests off the device, if anything."""
        if math.isinf(self._every) or number % int(self._every):
            return
        logger.info("step=%d, skipped=%d, lr=%s, mom=%s", number, skipped, lr, mom)
        if self._clock:
            parts = " | ".join(f"{name}: {1e3 * spent / self._every:.2f}" for name, spent in self._seconds.items())
            logger.info("time (ms per step over %d steps) | %s", int(self._every), parts)
            self._seconds.clear()
        if self._memory:
            parts = " | ".join(f"{name}: {nbytes / MIB:.1f}" for name, nbytes in held()._asdict().items())
            logger.info("model state on rank 0 (MiB) | %s", parts)
            if off is not None:
                kinds = off._asdict() | {"in memory": off.memory}
                parts = " | ".join(f"{name}: {nbytes / MIB:.1f}" for name, nbytes in kinds.items())
                logger.info("off the device on rank 0 (MiB) | %s", parts)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def describe(
    sharded: ShardedModule, stage: int, dtype: str, device: torch.device, held: StateBytes, formats: Formats
) -> str:
    """The line at the start: what was made of the model."""
    numel = sum(spec.numel for unit in sharded.units for spec in unit.plan.params)
    compiled = isa() if device.type == "cpu" else "CUDA" if cuda.available(device) else "torch"
    kept = f", masters as {formats.master}" if dtype != "fp32" else ""
    kept += f", moments in {formats.moments}" if formats.moments != "fp32" else ""
    return (
        f"stage {stage} on {sharded.mesh.data.size} rank(s), {device.type}: {numel:,} parameters in {dtype}, "
        f"{len(sharded.units)} units, {held.total / MIB:.1f} MiB of model state per rank at rest, "
        f"{compiled} kernels{kept}"
    )
