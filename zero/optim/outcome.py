"""The outcome of an optimizer step: norm, factor and the ranks' reports; computed where the gradients are.

The device uses it without the host. It is copied to the host at once, and read there when it is asked for.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from zero.core.world import World
from zero.memory.streams import record_event
from zero.optim.norm import Norm, RankReport, reports_of


class Numbers(NamedTuple):
    """An outcome on the host.

    norm: of the averaged gradient, before clipping; factor: see `Outcome`; reports: of each global rank; bad: index of
    the first trained unit with a gradient that is not finite on a rank; the number of units without a check.
    """

    norm: float
    factor: float
    reports: dict[int, RankReport]
    bad: int


class Outcome:
    """The outcome of one step, alike on all ranks.

    factor: fp64 [] on the units' device, from the summed gradients to those that the optimizer uses; NaN if
            the step must change nothing;
    mean:   the same without clipping.
    """

    def __init__(self, norm: Norm, mean: float | torch.Tensor, limit: float, check: bool, world: World) -> None:
        """`mean` makes sums averages; `limit` is that of clipping, 0 for none; `check` requires finite gradients."""
        self.mean = mean
        value = norm.value * mean
        self.factor = step_factor(value, mean, limit, check)
        self._world = world
        numbers = torch.cat([value.view(1), self.factor.view(1), norm.rows.flatten()])
        self._sent = torch.empty_like(numbers, device="cpu", pin_memory=True) if numbers.is_cuda else numbers
        if numbers.is_cuda:
            self._sent.copy_(numbers, non_blocking=True)
        self._arrived = record_event(numbers.device)

    @functools.cached_property
    def numbers(self) -> Numbers:
        """The outcome on the host; waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        norm, factor, *flat = self._sent.tolist()
        size = len(flat) // self._world.size
        rows = [flat[start : start + size] for start in range(0, len(flat), size)]
        return Numbers(norm, factor, reports_of(self._world, rows), min(int(row[1]) for row in rows))


def step_factor(norm: torch.Tensor, mean: float | torch.Tensor, limit: float, check: bool) -> torch.Tensor:
    """`mean` times the factor that clips gradients of norm `norm`, fp64 [], to `limit`; see `Outcome`.

    As in torch.nn.utils.clip_grad_norm_: limit / (norm + 1e-6), never above 1, and 1 if `limit` is 0.
    """
    factor = torch.ones_like(norm) * mean
    if limit > 0.0:
        clip = torch.full_like(norm, limit) / (norm + 1e-6)  # a number over a tensor would be rounded twice
        factor = torch.where(clip < 1.0, mean * clip, factor)
    return factor + (norm - norm) if check else factor  # inf - inf is NaN
