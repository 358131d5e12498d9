"""What a rank records of a step besides its gradients, and what is warned of then: losses, tokens, the first batch.

It stays on the device until the step reads the norm of the gradients, and travels to the other ranks with that, so that
nothing is waited for and no message is sent for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero.core.hooks import tensors_in
from zero.core.torch_private import untransformed
from zero.core.world import World
from zero.engine.hashing import hash_of, hash_tensor
from zero.engine.status import Status
from zero.log import log_once, rank_zero
from zero.optim.norm import RankFlags, RankReport
from zero.watchdog.hang_report import ranks_text

_BELOW = (1 << 53) - 1  # of a hash as many bits as fp64 holds exactly


class StepRecord:
    """The running optimizer step of one rank; ranks at the places `unlike` in the world are to have other batches."""

    def __init__(self, world: World, device: torch.device, status: Status, unlike: Sequence[int]) -> None:
        self._unlike = unlike
        self._status = status
        self._device = device
        self._loss: torch.Tensor | None = None
        self._count = 0.0  # what the losses in it count
        self._tokens: float | torch.Tensor = 0.0
        self._batch: float | torch.Tensor = 0.0
        self._awaits_batch = world.size > 1
        self._position = math.inf  # of the scheduler, behind the last step
        self._moves = 0  # how often it has moved on between two steps

    @untransformed
    def batch(self, inputs: Any) -> None:
        """The inputs of a training forward; those of the first one are hashed."""
        if not self._awaits_batch:
            return
        self._awaits_batch = False
        found = [each for each in tensors_in(inputs) if type(each) is torch.Tensor and each.layout is torch.strided]
        hashes = [hash_tensor(each).to(self._device) for each in found if each.numel() and not each.is_meta]
        if hashes:
            self._batch = hash_of(torch.stack(hashes)).bitwise_and(_BELOW).double()

    def backward(
        self, loss: torch.Tensor, share: float, tokens: float | torch.Tensor = 0.0, count: float = 1.0
    ) -> None:
        """A backward of `loss`, of which `share` counts towards the loss of the step, over `tokens` tokens.

        count: of its micro-batch in the mean of the step; none of a `share` of 0.
        """
        if share:
            part = loss.detach().to(self._device, torch.float64).reshape(()) * share
            self._loss = part if self._loss is None else self._loss + part
        self._count += count
        if isinstance(tokens, torch.Tensor):
            tokens = tokens.detach().to(self._device, torch.float64).reshape(())
        self._tokens = self._tokens + tokens

    def report(self, more: float, counts: Sequence[float] | None) -> RankReport:
        """All since `clear`, for the other ranks. `more`: of the loss, where the step has fewer micro-batches.

        counts: of the micro-batches in the mean of the step, where that is over such counts.
        """
        known = RankReport(batch=self._batch, tokens=self._tokens)
        if counts is not None:
            known = known._replace(count=sum(counts), backwards=float(len(counts)))
            more = 1.0 / self._count if self._count else 0.0
        if self._loss is None:
            return known
        return known._replace(flags=RankFlags.LOSS, loss=self._loss * more)

    def clear(self, done: bool) -> None:
        """The step is over, or `done` is False and its gradients are gone."""
        self._loss, self._tokens, self._count = None, 0.0, 0.0
        if done:
            self._batch = 0.0

    def warn(self, reports: Mapping[int, RankReport]) -> None:
        """Warn of what the ranks report of the step that is just counted; rank 0 alone speaks."""
        status = self._status
        losses = {rank: each.loss for rank, each in reports.items() if RankFlags.LOSS in each.flags}
        if bad := {rank: loss for rank, loss in losses.items() if not math.isfinite(loss)}:
            status.not_finite += 1
            if math.log10(status.not_finite).is_integer():
                count = "" if status.not_finite == 1 else f", in {status.not_finite} steps so far"
                text = "the loss of step %d is %s on %s%s; torch.autograd.set_detect_anomaly(True) names what made it"
                rank_zero(logging.WARNING, text, status.global_steps, next(iter(bad.values())), ranks_text(bad), count)
        alike: dict[float, list[int]] = {}
        for rank, each in [list(reports.items())[place] for place in self._unlike]:
            alike.setdefault(each.batch, []).append(rank)
        alike.pop(0.0, None)
        if same := next((ranks for ranks in alike.values() if len(ranks) > 1), None):
            log_once(
                logging.WARNING,
                f"{ranks_text(same)} were fed the same first batch, so they compute the same and not more; give each "
                "rank its part: initialize(training_data=...), engine.deepspeed_io(...), or torch's DistributedSampler",
            )

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


def _position(scheduler: Any) -> float:
    """How often a scheduler of torch's or ours was stepped; 0 for one that does not say."""
    return getattr(scheduler, "last_epoch", getattr(scheduler, "last_batch_iteration", 0))


def mean_loss(reports: Mapping[int, RankReport]) -> float | None:
    """The loss of a step over all ranks that know theirs, each by what it counts; None where none does."""
    known = [each for each in reports.values() if RankFlags.LOSS in each.flags]
    counts = sum(float(each.count) for each in known)
    return sum(float(each.loss) * float(each.count) for each in known) / counts if counts else None
