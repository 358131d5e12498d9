"""What the engine logs of a run: a line at the start, one every so many steps, time and memory."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch

from zero.compat.bitsandbytes import format_of
from zero.config import Config
from zero.core.mesh import Mesh
from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit
from zero.engine.status import Status
from zero.engine.step_record import mean_loss
from zero.kernels import cuda
from zero.kernels.native import isa
from zero.log import counted, logger, rank_zero
from zero.monitor.module_calls import Stamp, ended, now, seconds
from zero.monitor.monitor import Monitor
from zero.monitor.step_report import Logged, StepReport, unit_norms
from zero.optim.muon_groups import rules_line
from zero.optim.norm import RankReport
from zero.optim.optimizer import ZeroOptimizer
from zero.plan.formats import ITEMSIZE
from zero.plan.memory import HostBytes, StateBytes
from zero.watchdog.rank_status import Collective

MIB = 2**20
_MEMORY_EVERY = 1.0  # seconds between two looks at the memory, for the monitors
_WAITING = "waiting for "  # in whatever phase it was
_WAITS = _WAITING + "updates"
_DIRECTIONS = {"gather": "gathers", "reduce": "reductions", "replica gather": "reductions"}


def _shared(mesh: Mesh) -> str:
    """How ranks share units beyond the usual, in words."""
    if mesh.shard.size > 1 and mesh.replica.size > 1:
        return f" ({mesh.replica.size} replicas of {mesh.shard.size} shards)"
    return f" (parameters gathered among {mesh.secondary.size})" if mesh.secondary is not None else ""


def _numbers(units: Sequence[Unit]) -> str:
    """How many parameters there are, and of each dtype or packed format how many."""
    kinds: Counter[str] = Counter()
    for unit in units:
        dtype = unit.plan.dtype
        for spec, param in zip(unit.plan.params, unit.params, strict=True):
            form = format_of(param)
            kinds[form or dtype] += spec.numel * (2 * ITEMSIZE[dtype] if form in ("nf4", "fp4") else 1)
    each = [f"{numel:,} in {kind}" for kind, numel in kinds.items()]
    text = f"{sum(kinds.values()):,} parameters"
    return f"{text} in {next(iter(kinds))}" if len(kinds) == 1 else f"{text} ({', '.join(each) or 'none'})"


@dataclass
class StepTotals:
    """Optimizer steps, their samples and tokens over all ranks, and the seconds of each phase.

    since: the time.perf_counter() from which it counts.
    """

    since: float | None = None
    steps: int = 0
    samples: int = 0
    tokens: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, report: StepReport) -> None:
        """Count one step, whose phases are counted as they end."""
        self.steps += 1
        self.samples += report.samples
        self.tokens += report.tokens
        if report.waits is not None:
            self.seconds[_WAITS] = self.seconds.get(_WAITS, 0.0) + report.waits


class Ended(NamedTuple):
    """A step: when it ended (time.perf_counter()), its samples over all ranks, and what the script has logged in it."""

    at: float
    samples: int
    values: dict[str, Any]


class _Reported(NamedTuple):
    """When the last report was made, and when the last one with memory (time.perf_counter()); bytes sent by then."""

    at: float
    memory: float = -math.inf
    sent: int = 0


class Progress:
    """Makes a report of each step, for the monitors and for the log of rank 0.

    The log follows `steps_per_print`, `wall_clock_breakdown` and `memory_breakdown` of the JSON. Without a wait for the
    device that the step does not have anyway: what is said of a step was read with the norm.
    """

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
        self.monitor = Monitor(sharded.world.watchdog.status)
        self._speaks = sharded.world.global_rank == 0 and not math.isinf(config.steps_per_print)
        self._phases: deque[tuple[str, Any, Any]] = deque()  # name, begin and end of those not counted yet
        self._recent, self._all = StepTotals(), StepTotals()  # since the last line, and since the first forward
        self._end = weakref.finalize(self, _log_end, self._all)  # at the end of the process, if not before
        self._logged: dict[str, Any] = {}  # by `log`, to be shown at the end of the line of a step
        self._fresh: dict[str, Any] = {}  # those of the running step
        self._spent: dict[str, float] = {}  # seconds of phases since the last report
        self._reported = _Reported(time.perf_counter())

    def state_nbytes(self) -> StateBytes:
        """Bytes of model state alive on this rank's device now: parameters, gradients, optimizer (masters included).

        Before the first step the optimizer counts with what that step makes, but for a class that is not torch's.
        """
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
        compiled = isa() if device.type == "cpu" else "CUDA" if cuda.kernels(device) else "torch"
        kept = f", masters as {formats.master}" if dtype != "fp32" else ""
        kept += f", moments in {formats.moments}" if formats.moments != "fp32" else ""
        rest = f"{self.state_nbytes().total / MIB:.1f} MiB of model state per rank at rest"
        if self._optimizer is not None and not self._optimizer.states.sized:
            rest += ", and on top what the optimizer makes in its first step"
        grid, ranks = sharded.meshes.grid, counted(sharded.world.size, "rank")
        of_rank = " of this rank" if max(map(grid.size, ("pp", "tp", "ep"))) > 1 else ""  # others have other parts
        ranks += f" ({grid.factors})" if of_rank else ""
        ranks += "".join(dict.fromkeys(_shared(unit.mesh) for unit in sharded.units))
        rank_zero(
            logging.INFO,
            f"stage {config.zero_optimization.stage} on {ranks}, {device.type}: "
            f"{_numbers(sharded.units)}, {counted(len(sharded.units), 'unit')}{of_rank}, "
            f"{rest}, {compiled} kernels{kept}",
        )
        if self._optimizer is not None and self._optimizer.host_threads:
            rank_zero(
                logging.INFO, "the host updates with %s on each rank", counted(self._optimizer.host_threads, "thread")
            )
        if self._optimizer is not None:
            names = {param: name for name, param in sharded.module.named_parameters()}
            if rules := rules_line(self._optimizer.param_groups, names):
                rank_zero(logging.INFO, "%s", rules)
        if config.dump_state:
            rank_zero(logging.INFO, "configuration: %s", config.model_dump_json(indent=2))

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Show values of the script's own in the line of each `steps_per_print` steps, each the latest of its name.

        Numbers, tensors of one element (read when the line is written, so no GPU is waited for) or anything that has a
        text; those of rank 0, so take `engine.reduce` for a mean over ranks. They are of the step that runs or comes
        next, or, behind the last one, of that; with `step`, of that one, which has ended. ValueError for what is no
        mapping, and for another step.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f'log(): got {type(values).__name__}, wanted a mapping such as {{"accuracy": 0.5}}')
        kept = {str(name): _kept(name, value) for name, value in values.items()}
        self._logged |= kept
        done = self._status.global_steps
        if step is None or step == done + 1:
            self._fresh |= kept
            self.monitor.hold(Logged(done, self._status.global_samples, self._fresh.copy()))
        elif isinstance(step, bool) or not isinstance(step, int) or not 0 < step <= done:
            raise ValueError(f"log(step={step!r}): wanted the number of a step that has ended, from 1 to {done}")
        else:
            self.monitor.tell(Logged(step, self._status.global_samples * step // done, kept))

    def _logged_parts(self) -> list[str]:
        read = {name: one.item() if isinstance(one, torch.Tensor) else one for name, one in self._logged.items()}
        return [f"{name}={one:.5g}" if isinstance(one, float) else f"{name}={one}" for name, one in read.items()]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside towards `name`: that of a GPU, which is not waited for, or of the host."""
        if not (self._speaks or self.monitor.enabled):
            yield
            return
        if self._recent.since is None:
            self._recent.since = self._all.since = time.perf_counter()
            self._reported = _Reported(self._all.since)
        self._count_phases()
        start = now(self._device)
        try:
            yield
        finally:
            self._phases.append((name, start, now(self._device)))

    def step_ended(self, samples: int) -> Ended:
        """An optimizer step of so many samples has just ended; for `report_step`."""
        self._fresh, fresh = {}, self._fresh
        self.monitor.hold(None)
        return Ended(time.perf_counter(), samples, fresh)

    def report_step(self, reports: Mapping[int, RankReport], ended: Ended) -> None:
        """Tell of the last optimizer step, of which all is known now, and log it, if it is its turn."""
        if not (self._speaks or self.monitor.enabled):
            return
        report = self._report(reports, ended)
        self.monitor.tell(report)
        if not self._speaks:
            return
        for tally in (self._recent, self._all):
            tally.add(report)
        if report.step % int(self._config.steps_per_print) == 0 and logger.isEnabledFor(logging.INFO):
            self._log(report)

    def report_norms(self, norms: Mapping[str, tuple[float, float, float]], samples: int) -> None:
        """Tell of the norms of the units, which are those of the step before the last one, of so many samples."""
        if norms and self._sharded.world.global_rank == 0:
            self.monitor.tell(unit_norms(self._status.global_steps - 1, self._status.global_samples - samples, norms))

    def _report(self, reports: Mapping[int, RankReport], ended: Ended) -> StepReport:
        self._count_phases()
        status, optimizer, world, last = self._status, self._optimizer, self._sharded.world, self._reported
        at, samples, values = ended
        sent = world.watchdog.status.sent
        spent, self._spent = self._spent, {}
        whole = self.monitor.enabled and at - last.memory >= _MEMORY_EVERY
        self._reported = _Reported(at, at if whole else last.memory, sent)
        first = world.global_rank == 0
        if not first:  # what is its own
            reports, samples = {world.global_rank: reports[world.global_rank]}, samples // self._sharded.meshes.sizes[0]
        return StepReport(
            step=status.global_steps,
            time=time.time(),
            seconds=at - last.at,
            samples=samples,
            tokens=sum(each.tokens for each in reports.values()),
            global_samples=status.global_samples,
            skipped=optimizer.skipped,
            loss=mean_loss(reports),
            norm=optimizer.grad_norm if first else None,
            lr=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group) if first else (),
            scale=optimizer.loss_scale if first and self._config.scales_loss else None,
            phases={name: each for name, each in spent.items() if not name.startswith(_WAITING)},
            waits=optimizer.waited(),
            bytes=self._kinds() if whole else {},
            sent=sent - last.sent,
            values=values,
        )

    def _kinds(self) -> dict[str, int]:
        """Bytes by kind: of the state on the device and off it, and of all that is there besides."""
        host, name = self.host_nbytes(), "GPU memory" if self._device.type == "cuda" else "memory"
        off = {} if host is None else {f"host {kind}": nbytes for kind, nbytes in host._asdict().items()}
        return self.state_nbytes()._asdict() | off | {name: self._memory()}

    def _log(self, report: StepReport) -> None:
        logger.info("%s", " | ".join(self._parts(report)))
        self._recent = StepTotals(since=time.perf_counter())
        if self._config.memory_breakdown:
            logger.info("model state on rank 0 (MiB) | %s", _mib(self.state_nbytes()._asdict()))
            if (host := self.host_nbytes()) is not None:
                logger.info("off the device on rank 0 (MiB) | %s", _mib(host._asdict() | {"in memory": host.memory}))

    def waited(self, collective: Collective, begun: Stamp, start: Stamp, end: Stamp) -> None:
        """The loop has stood still for a collective, from `start` to `end`."""
        self._phases.append((_WAITING + _DIRECTIONS.get(collective.direction, "others"), start, end))

    def log_end(self) -> None:
        """Log the whole run in one line; once, and by itself where the program ends without asking for it."""
        self._count_phases()
        self._end()
        self.monitor.close()

    def _parts(self, report: StepReport) -> list[str]:
        """Of the line of a step: those that there are."""
        status, recent = self._status, self._recent
        seconds = time.perf_counter() - recent.since
        done, what = (recent.tokens, "tokens") if recent.tokens else (recent.samples, "samples")
        rates = sorted(report.lr)
        parts = {
            f"step {report.step}": True,
            f"loss {report.loss or 0:.4g}": report.loss is not None,
            f"norm {report.norm:.3g}": True,
            f"lr {' to '.join(f'{lr:.3g}' for lr in dict.fromkeys(rates[:1] + rates[-1:]))}": bool(rates),
            f"loss scale {report.scale or 0:g}": report.scale is not None,
            f"skipped {status.skipped_steps}": status.skipped_steps > 0,
            f"loss not finite {status.not_finite}": status.not_finite > 0,
            f"{_short(done / seconds)} {what}/s": True,
            f"{_short(1e3 * seconds / recent.steps)} ms/step": True,
            self._memory_text(): True,
            _shares(recent.seconds, seconds): self._config.wall_clock_breakdown,
        }
        return [*(text for text, there in parts.items() if there), *self._logged_parts()]

    def _memory_text(self) -> str:
        return f"{'GPU ' if self._device.type == 'cuda' else ''}memory {_bytes(self._memory())}"

    def _memory(self) -> int:
        """The most that the GPU held so far, or what the process holds of the machine's memory now."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return psutil.Process().memory_info().rss

    def _count_phases(self) -> None:
        """Of those that have ended, on a GPU too, in their order."""
        while self._phases and ended(self._phases[0][2]):
            name, start, end = self._phases.popleft()
            for spent in (self._spent, self._recent.seconds, self._all.seconds):
                spent[name] = spent.get(name, 0.0) + seconds(start, end)


def _kept(name: Any, value: Any) -> Any:
    """A value to be read later: what of a tensor is in use by then may have changed."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"log(): got shape {tuple(value.shape)} for {str(name)!r}, wanted one number")
    return value.detach().clone()


def _mib(nbytes: Mapping[str, int]) -> str:
    return " | ".join(f"{name}: {each / MIB:.1f}" for name, each in nbytes.items())


def _log_end(tally: StepTotals) -> None:
    if not tally.steps:
        return
    seconds = time.perf_counter() - tally.since
    shares = f": {_shares(tally.seconds, seconds)}" if tally.seconds else ""
    took = f"{seconds:.1f} s" if seconds < 600 else str(timedelta(seconds=round(seconds)))
    logger.info("%s", f"{counted(tally.steps, 'step')}, {counted(tally.samples, 'sample')} in {took}{shares}")


def _shares(spent: Mapping[str, float], whole: float) -> str:
    """The phases in percent of `whole` seconds, and what is left of it, as the loading of data."""
    phases = {name: seconds for name, seconds in spent.items() if not name.startswith(_WAITING)}
    waits = {name.removeprefix(_WAITING): seconds for name, seconds in spent.items() if name not in phases}
    phases["other"] = max(0.0, whole - sum(phases.values()))
    shares = [", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in each.items()) for each in (phases, waits)]
    return shares[0] + (f" ({_WAITING}{shares[1]})" if waits else "")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f} MiB" if nbytes < 10 * 1024 * MIB else f"{nbytes / MIB / 1024:,.1f} GiB"
