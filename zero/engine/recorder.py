"""What a rank records of each optimizer step, besides its gradients: losses, tokens, the first batch, times, memory.

What all ranks are to know stays on the device until the step reads the norm of the gradients, and travels to the other
ranks with that, so that nothing is waited for and no message is sent for it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zero.config import Config
from zero.core.hooks import tensors_in
from zero.core.sharded_module import ShardedModule
from zero.core.torch_private import untransformed
from zero.engine.expert_tokens import ExpertTokens, line_of, share_of_fullest
from zero.engine.hashing import hash_of, hash_tensor
from zero.engine.status import Status
from zero.engine.unit_norms import UnitNorms
from zero.log import log_once, logger, rank_zero
from zero.monitor.monitor import Monitor
from zero.monitor.phases import PhaseTimes
from zero.monitor.printer import Printer, in_mib, memory
from zero.monitor.step_record import Line, StepRecord
from zero.optim.norm import RankFlags, RankReport
from zero.optim.optimizer import ZeroOptimizer
from zero.parallel.experts.cutting import CutExperts
from zero.plan.grid import DATA
from zero.plan.memory import HostBytes, StateBytes
from zero.watchdog.hang_report import ranks_text

_MEMORY_EVERY = 1.0  # seconds between two looks at the memory, for the monitors
_BELOW = (1 << 53) - 1  # of a hash as many bits as fp64 holds exactly


@dataclass
class _Running:
    """The running step: the loss so far, what the losses in it count, the tokens, and a hash of the first batch."""

    loss: torch.Tensor | None = None
    count: float = 0.0
    tokens: float | torch.Tensor = 0.0
    batch: float | torch.Tensor = 0.0


class StepRecorder:
    """Makes a record of each step, for the monitors, and for the log of rank 0.

    Without a wait for the device that the step does not have anyway: what a record says was read with the norm.
    """

    def __init__(
        self,
        config: Config,
        sharded: ShardedModule,
        optimizer: ZeroOptimizer | None,
        status: Status,
        experts: CutExperts | None = None,
    ) -> None:
        self._config = config
        self._sharded = sharded
        self._optimizer = optimizer
        self._status = status
        self.monitor = Monitor(sharded.world.watchdog.status)
        self.phases = PhaseTimes(sharded.device)
        speaks = sharded.world.global_rank == 0 and not math.isinf(config.steps_per_print)
        self._printer = Printer(config, sharded.device) if speaks else None
        every = config.zero.unit_norms if optimizer is not None else 0
        self._norms = UnitNorms(sharded, optimizer, every) if every else None
        self._experts = None if experts is None else ExpertTokens(config, sharded, experts)
        self._running = _Running()
        self._awaits_batch = sharded.world.size > 1 and not config.zero.full_batch
        self._fresh: dict[str, Any] = {}  # values that the script has logged in the running step
        self._ended: float | None = None  # the last step, or the first forward began; time.perf_counter()
        self._looked = -math.inf  # when the last record with memory was made
        self._sent = 0  # bytes until the last record
        self._position = math.inf  # of the scheduler, behind the last step
        self._moves = 0  # how often it has moved on between two steps

    def state_nbytes(self) -> StateBytes:
        """Bytes of model state alive on this rank's device now: parameters, gradients, optimizer (masters included).

        Before the first step the optimizer counts with what that step makes, but for a class that is not torch's.
        """
        nbytes = self._sharded.nbytes()
        return nbytes._replace(optimizer=nbytes.optimizer + (self._optimizer.nbytes() if self._optimizer else 0))

    def host_nbytes(self) -> HostBytes | None:
        """Bytes of model state of this rank off the device, in host memory and in files; None without offload."""
        return self._sharded.offload.host if self._sharded.offload is not None else None

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
        if self._printer is not None:
            self._printer.keep(kept)
        done, samples = self._status.global_steps, self._status.global_samples
        if step is None or step == done + 1:
            self._fresh |= kept
            self.monitor.hold(Line("log", {"step": done}, logged=(self._fresh.copy(), samples)))
        elif isinstance(step, bool) or not isinstance(step, int) or not 0 < step <= done:
            raise ValueError(f"log(step={step!r}): wanted the number of a step that has ended, from 1 to {done}")
        else:
            self.monitor.tell(Line("log", {"step": step}, logged=(kept, samples * step // done)))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside towards the phase `name`, if anybody reads it."""
        if not self._listens:
            yield
            return
        if self._ended is None:
            self._ended = time.perf_counter()
            if self._printer is not None:
                self._printer.begin(self._ended)
        with self.phases.measure(name):
            yield

    @untransformed
    def batch(self, inputs: Any) -> None:
        """The inputs of a training forward; those of the first one are hashed."""
        if not self._awaits_batch:
            return
        self._awaits_batch = False
        found = [each for each in tensors_in(inputs) if type(each) is torch.Tensor and each.layout is torch.strided]
        hashes = [hash_tensor(each).to(self._sharded.device) for each in found if each.numel() and not each.is_meta]
        if hashes:
            self._running.batch = hash_of(torch.stack(hashes)).bitwise_and(_BELOW).double()

    def backward(
        self, loss: torch.Tensor, share: float, tokens: float | torch.Tensor = 0.0, count: float = 1.0
    ) -> None:
        """A backward of `loss`, of which `share` counts towards the loss of the step, over `tokens` tokens.

        count: of its micro-batch in the mean of the step; none of a `share` of 0.
        """
        running = self._running
        if share:
            part = loss.detach().to(self._sharded.device, torch.float64).reshape(()) * share
            running.loss = part if running.loss is None else running.loss + part
        running.count += count
        if isinstance(tokens, torch.Tensor):
            tokens = tokens.detach().to(self._sharded.device, torch.float64).reshape(())
        running.tokens = running.tokens + tokens

    def clear(self) -> None:
        """The gradients of the step are gone."""
        self._running = _Running(batch=self._running.batch)

    def report(self, more: float, counts: Sequence[float] | None) -> RankReport:
        """What this rank tells the others of the step. `more`: of the loss, if the step has fewer micro-batches.

        counts: of the micro-batches in the mean of the step, where that is over such counts.
        """
        if self._experts is not None:
            self._experts.gather(self._status.global_steps + 1)
        running = self._running
        known = RankReport(batch=running.batch, tokens=running.tokens)
        if self._norms is not None:
            known = known._replace(squares=self._norms.take(self._status.global_steps + 1))
        if counts is not None:
            known = known._replace(count=sum(counts), backwards=float(len(counts)))
            more = 1.0 / running.count if running.count else 0.0
        if running.loss is None:
            return known
        return known._replace(flags=RankFlags.LOSS, loss=running.loss * more)

    def step_ended(self, samples: int) -> StepRecord:
        """An optimizer step of so many samples over all ranks has just ended; for `conclude`."""
        at, values = time.perf_counter(), self._fresh
        self._running, self._fresh = _Running(), {}
        self.monitor.hold(None)
        took, self._ended = at - (at if self._ended is None else self._ended), at
        if self._experts is not None:
            self._experts.step_ended()
        step, global_samples = self._status.global_steps, self._status.global_samples
        return StepRecord(step=step, seconds=took, samples=samples, global_samples=global_samples, values=values)

    def conclude(self, record: StepRecord, reports: Mapping[int, RankReport]) -> None:
        """All ranks' reports of the last step are known: warn of it, complete its record, and pass that on."""
        self._warn(reports)
        first = self._sharded.world.global_rank == 0
        if self._norms is not None and first and reports[0].squares:  # of the step before
            self.monitor.tell(self._norms.line(reports, record.step - 1, record.global_samples - record.samples))
        if self._experts is not None and (tokens := self._experts.take()) and first:
            self.monitor.tell(line_of(tokens, record.step, record.global_samples))
            if self._printer is not None:
                self._printer.keep({"fullest_expert": round(max(map(share_of_fullest, tokens.values())), 3)})
        if not self._listens:
            return
        record = self._completed(record, reports)
        self.monitor.tell(record)
        if self._printer is not None and self._printer.step(record) and self._config.memory_breakdown:
            logger.info("model state on rank 0 (MiB) | %s", in_mib(self.state_nbytes()._asdict()))
            if (host := self.host_nbytes()) is not None:
                logger.info("off the device on rank 0 (MiB) | %s", in_mib(host._asdict() | {"in memory": host.memory}))

    def end(self) -> None:
        """The run is over: log it in one line, and wait until the monitors have written all."""
        if self._printer is not None:
            self._printer.end(**self.phases.take())
        self.monitor.close()

    def step_scheduler(self, scheduler: Any, lr_kwargs: Mapping[str, Any]) -> None:
        """Step it, and warn where the script does so, too: the second time, as one may be to go on somewhere else."""
        self._moves += _position(scheduler) > self._position
        if self._moves > 1:
            log_once(
                logging.WARNING,
                "scheduler.step() beside engine.step(), which steps the scheduler itself: the schedule moves on twice "
                "per step; remove the call, or set engine.lr_scheduler to None behind initialize()",
            )
        scheduler.step(**lr_kwargs)
        self._position = _position(scheduler)

    @property
    def _listens(self) -> bool:
        """Whether anybody reads records."""
        return self._printer is not None or self.monitor.enabled

    def _completed(self, record: StepRecord, reports: Mapping[int, RankReport]) -> StepRecord:
        optimizer, world, samples = self._optimizer, self._sharded.world, record.samples
        sent, first = world.watchdog.status.sent, world.global_rank == 0
        looks = self.monitor.enabled and self._ended - self._looked >= _MEMORY_EVERY
        if not first:  # what is its own
            reports, samples = {world.global_rank: reports[world.global_rank]}, samples // self._sharded.meshes.sizes[0]
        if looks:
            self._looked = self._ended
        before, self._sent = self._sent, sent
        spent, waited = self.phases.take(), optimizer.waited()
        return replace(
            record,
            samples=samples,
            tokens=sum(each.tokens for each in reports.values()),
            skipped=optimizer.skipped,
            loss=mean_loss(reports),
            norm=optimizer.grad_norm if first else None,
            lr=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group) if first else (),
            scale=optimizer.loss_scale if first and self._config.scales_loss else None,
            bytes=self._nbytes() if looks else {},
            sent=sent - before,
            skipped_steps=self._status.skipped_steps,
            not_finite=self._status.not_finite,
            phases=spent["phases"],
            waiting=spent["waiting"] if waited is None else {**spent["waiting"], "updates": waited},
        )

    def _nbytes(self) -> dict[str, int]:
        """Bytes by kind: of the state on the device and off it, and of all that is there besides."""
        host = self.host_nbytes()
        off = {} if host is None else {f"host {kind}": nbytes for kind, nbytes in host._asdict().items()}
        return self.state_nbytes()._asdict() | off | dict([memory(self._sharded.device)])

    def _warn(self, reports: Mapping[int, RankReport]) -> None:
        """Warn of losses that are not finite, and of equal first batches; rank 0 alone speaks."""
        status = self._status
        losses = {rank: each.loss for rank, each in reports.items() if RankFlags.LOSS in each.flags}
        if bad := {rank: loss for rank, loss in losses.items() if not math.isfinite(loss)}:
            status.not_finite += 1
            if math.log10(status.not_finite).is_integer():
                count = "" if status.not_finite == 1 else f", in {status.not_finite} steps so far"
                text = "the loss of step %d is %s on %s%s; torch.autograd.set_detect_anomaly(True) names what made it"
                rank_zero(logging.WARNING, text, status.global_steps, next(iter(bad.values())), ranks_text(bad), count)
        if not any(each.batch for each in reports.values()):
            return
        alike: dict[float, list[int]] = {}
        for place in self._sharded.meshes.grid.ranks(DATA, 0):  # these are to have other batches
            rank, each = list(reports.items())[place]
            alike.setdefault(each.batch, []).append(rank)
        alike.pop(0.0, None)
        if same := next((ranks for ranks in alike.values() if len(ranks) > 1), None):
            log_once(
                logging.WARNING,
                f"{ranks_text(same)} were fed the same first batch, so they compute the same and not more; give each "
                "rank its part: initialize(training_data=...), engine.deepspeed_io(...), or torch's DistributedSampler",
            )


def _position(scheduler: Any) -> float:
    """How often a scheduler of torch's or ours was stepped; 0 for one that does not say."""
    return getattr(scheduler, "last_epoch", getattr(scheduler, "last_batch_iteration", 0))


def mean_loss(reports: Mapping[int, RankReport]) -> float | None:
    """The loss of a step over all ranks that know theirs, each by what it counts; None where none does."""
    known = [each for each in reports.values() if RankFlags.LOSS in each.flags]
    counts = sum(float(each.count) for each in known)
    return sum(float(each.loss) * float(each.count) for each in known) / counts if counts else None


def _kept(name: Any, value: Any) -> Any:
    """A value to be read later: what of a tensor is in use by then may have changed."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"log(): got shape {tuple(value.shape)} for {str(name)!r}, wanted one number")
    return value.detach().clone()
