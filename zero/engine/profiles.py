"""The profiles of a run: `flops_profiler`, `comms_logger`, `zero.profile` and `wall_clock_breakdown`'s waits."""

from __future__ import annotations

import functools
import math
import time

import torch

from zero.config import Config
from zero.core.mixed_precision import DTYPES
from zero.core.sharded_module import ShardedModule
from zero.engine.recorder import StepRecorder
from zero.monitor.comms import CommsLog
from zero.monitor.flops import FlopsProfile, matmul_rate
from zero.monitor.module_calls import now
from zero.monitor.step_record import Line
from zero.monitor.trace import StepTrace
from zero.sizes.rates import DEVICES, REACHED
from zero.sizes.recorder import FORMULAS


class Profiles:
    """The profiles of one engine.

    comms: None where no log of messages was asked for.
    """

    def __init__(self, config: Config, sharded: ShardedModule, recorder: StepRecorder) -> None:
        """`recorder`: takes waits, MFU, and the timeline of a step."""
        self._recorder, device = recorder, sharded.device
        self._ended = time.perf_counter()  # the last step
        section, rank = config.comms_logger, sharded.world.global_rank
        events, self._end_waits = sharded.world.watchdog.events, lambda: None
        if sharded.world.native:  # else the host waits itself
            events.clock = functools.partial(now, device)
        self.comms = CommsLog(section, events) if section.enabled else None
        if config.wall_clock_breakdown and rank == 0 and not math.isinf(config.steps_per_print):
            self._end_waits = events.subscribe(waited=recorder.phases.waited)
        tell = None if config.zero.report is None else lambda found: recorder.monitor.tell(Line("timeline", found))
        self._trace = StepTrace(config.zero.profile, sharded, tell)
        self._flops: FlopsProfile | None = None
        if config.flops_profiler.enabled and rank == 0:
            dtype = config.autocast_dtype or config.compute_dtype
            most = functools.partial(peak, dtype, device)
            self._flops = FlopsProfile(config.flops_profiler, sharded.module, device, most, FORMULAS)
        self.step_ended(0)

    def step_ended(self, step: int) -> None:
        """The step with this number is over; 0 at the start. MFU, once it is known, stands in its report."""
        took = time.perf_counter() - self._ended
        self._trace.step_ended(step)
        if self._flops is not None:
            # First of the step that is timed: the one that is counted takes longer.
            if (mfu := self._flops.mfu(took)) is not None:
                self._recorder.log({"MFU": mfu})
            self._flops.step_ended(step, took)
        self._ended = time.perf_counter()

    def close(self) -> None:
        """Leave the engine as it was, and tell what was found."""
        self._trace.close()
        if self._flops is not None:
            self._flops.close()
        self._end_waits()
        if self.comms is not None:
            self.comms.close()


def asked(config: Config) -> bool:
    """Whether the JSON asks for a profile."""
    switches = config.comms_logger.enabled, config.flops_profiler.enabled, config.wall_clock_breakdown
    return any(switches) or config.zero.profile.steps is not None or config.zero.report is not None


def peak(dtype: str, device: torch.device) -> float:
    """The FLOP/s in products of matrices that a GPU's data sheet says; where there is none, measured now."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    for known, rates in DEVICES.items():
        if known in name and dtype in rates.flops:
            return rates.flops[dtype] / REACHED["flops"]
    return matmul_rate(DTYPES[dtype], device)
