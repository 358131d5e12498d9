"""What the engine logs of a run: a line at the start, one every so many steps, time and memory."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zero.config import Config
from zero.core.sharded_module import ShardedModule
from zero.engine.status import Status
from zero.kernels import cuda
from zero.kernels.native import isa
from zero.log import logger, rank_zero
from zero.memory.host_bytes import HostBytes
from zero.optim.optimizer import ZeroOptimizer
from zero.plan.memory import StateBytes

MIB = 2**20
_WAITS = "of that waiting for updates"  # the last in its line


class Progress:
    """Logs on rank 0: `steps_per_print`, `wall_clock_breakdown` and `memory_breakdown` of the JSON."""

    def __init__(
        self,
        config: Config,
        sharded: ShardedModule,
        optimizer: ZeroOptimizer | None,
        status: Status,
        device: torch.device,
    ) -> None:
        self._config = config
        self._sharded = sharded
        self._optimizer = optimizer
        self._status = status
        self._device = device
        self._every = config.steps_per_print if sharded.mesh.data.rank == 0 else math.inf
        self._seconds: dict[str, float] = {}
        self._logged: dict[str, Any] = {}  # by `log`, to be shown at the end of the line of a step

    def state_nbytes(self) -> StateBytes:
        """Bytes of model state alive on this rank's device now: parameters, gradients, optimizer (masters included)."""
        nbytes = self._sharded.nbytes()
        return nbytes._replace(optimizer=nbytes.optimizer + (self._optimizer.nbytes() if self._optimizer else 0))

    def host_nbytes(self) -> HostBytes | None:
        """Bytes of model state of this rank off the device, in host memory and in files; None without offload."""
        return self._sharded.offload.host if self._sharded.offload is not None else None

    def log_start(self) -> None:
        """Log what was made of the model."""
        config, sharded, device = self._config, self._sharded, self._device
        dtype = config.compute_dtype
        formats = sharded.numerics.formats
        numel = sum(spec.numel for unit in sharded.units for spec in unit.plan.params)
        compiled = isa() if device.type == "cpu" else "CUDA" if cuda.kernels(device) else "torch"
        kept = f", masters as {formats.master}" if dtype != "fp32" else ""
        kept += f", moments in {formats.moments}" if formats.moments != "fp32" else ""
        mesh = sharded.mesh
        ranks = f"{mesh.data.size} rank(s)"
        if mesh.shard.size > 1 and mesh.replica.size > 1:
            ranks += f" ({mesh.replica.size} replicas of {mesh.shard.size} shards)"
        elif mesh.secondary is not None:
            ranks += f" (parameters gathered among {mesh.secondary.size})"
        rank_zero(
            logging.INFO,
            f"stage {config.zero_optimization.stage} on {ranks}, {device.type}: "
            f"{numel:,} parameters in {dtype}, {len(sharded.units)} units, "
            f"{self.state_nbytes().total / MIB:.1f} MiB of model state per rank at rest, {compiled} kernels{kept}",
        )
        if self._optimizer is not None and self._optimizer.host_threads:
            rank_zero(logging.INFO, "the host updates with %d thread(s) on each rank", self._optimizer.host_threads)
        if config.dump_state:
            rank_zero(logging.INFO, "configuration: %s", config.model_dump_json(indent=2))

    def log(self, values: Mapping[str, Any]) -> None:
        """Show values of the script's own in the line of each `steps_per_print` steps, each the latest of its name.

        Numbers, tensors of one element (read when the line is written, so no GPU is waited for) or anything that has a
        text; those of rank 0, so take `engine.reduce` for a mean over ranks. ValueError for what is no mapping.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f'log(): got {type(values).__name__}, wanted a mapping such as {{"accuracy": 0.5}}')
        self._logged |= {str(name): _kept(name, value) for name, value in values.items()}

    def _logged_parts(self) -> list[str]:
        read = {name: one.item() if isinstance(one, torch.Tensor) else one for name, one in self._logged.items()}
        return [f"{name}={one:.5g}" if isinstance(one, float) else f"{name}={one}" for name, one in read.items()]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside towards `name`, if asked to; a GPU is waited for at both ends then, which costs."""
        if not self._config.wall_clock_breakdown:
            yield
            return
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def log_step(self) -> None:
        """Log the optimizer step that has just ended, if it is its turn."""
        config, status, groups = self._config, self._status, self._optimizer.param_groups
        seconds = self._optimizer.waited()
        if seconds is not None and config.wall_clock_breakdown:
            self._seconds[_WAITS] = self._seconds.pop(_WAITS, 0.0) + seconds
        if math.isinf(self._every) or status.global_steps % int(self._every):
            return
        text = "step=%d, skipped=%d, lr=%s, mom=%s"
        lr = [group.get("lr") for group in groups]
        text = ", ".join([text, *(part.replace("%", "%%") for part in self._logged_parts())])
        logger.info(text, status.global_steps, status.skipped_steps, lr, momentum_of(groups))
        if config.wall_clock_breakdown:
            parts = " | ".join(f"{name}: {1e3 * spent / self._every:.2f}" for name, spent in self._seconds.items())
            logger.info("time (ms per step over %d steps) | %s", int(self._every), parts)
            self._seconds.clear()
        if config.memory_breakdown:
            parts = " | ".join(f"{name}: {nbytes / MIB:.1f}" for name, nbytes in self.state_nbytes()._asdict().items())
            logger.info("model state on rank 0 (MiB) | %s", parts)
            host = self.host_nbytes()
            if host is not None:
                kinds = host._asdict() | {"in memory": host.memory}
                parts = " | ".join(f"{name}: {nbytes / MIB:.1f}" for name, nbytes in kinds.items())
                logger.info("off the device on rank 0 (MiB) | %s", parts)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _kept(name: Any, value: Any) -> Any:
    """A value to be read later: what of a tensor is in use by then may have changed."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"log(): got shape {tuple(value.shape)} for {str(name)!r}, wanted one number")
    return value.detach().clone()


def momentum_of(groups: list[dict[str, object]]) -> list[object]:
    """The momentum, or Adam's betas, of each parameter group."""
    key = "betas" if all("betas" in group for group in groups) else "momentum"
    return [group.get(key) for group in groups]
