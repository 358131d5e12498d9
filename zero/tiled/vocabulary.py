"""The tiled loss where each rank has some rows of the head: M. Shoeybi et al., "Megatron-LM", 2019, section 3."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zero.core import comm
from zero.core.owner import cut_of, owner_of
from zero.core.world import Axis


class Vocabulary(NamedTuple):
    """The rows [start, start + n) of `total` are here; `axis`: of the ranks that have the others."""

    axis: Axis
    start: int
    total: int

    @staticmethod
    def of(weight: Tensor) -> Vocabulary | None:
        """Of the weight of a head; None where all rows are here.

        Raises ValueError for one that is cut otherwise, and for one whose ranks no engine knows.
        """
        if (cut := cut_of(weight)) is None:
            return None
        owner = owner_of(weight)
        if len(cut.boxes) != 1 or cut.boxes[0].sizes[1:] != cut.shape[1:] or not hasattr(owner, "unit"):
            raise ValueError(
                f"tiled_cross_entropy(weight=...): got a part of a weight {cut.shape}; wanted some of its rows, cut "
                "over the ranks of an engine"
            )
        return Vocabulary(owner.unit.mesh.beside, cut.boxes[0].offset[0], cut.shape[0])

    def sums(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Columns [rows, 1] summed over the ranks, in their order, so that all have the same bits."""
        rows = comm.gather_scalars(torch.cat(columns).flatten(), self.axis, "loss of a vocabulary", read=False)
        return rows.sum(0).unsqueeze(1).chunk(len(columns))

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Turn this rank's logits [rows, n] into logarithms of probabilities among all; returns those of the sums."""
        largest = (
            comm.gather_scalars(logits.amax(1), self.axis, "loss of a vocabulary", read=False).amax(0).unsqueeze(1)
        )
        logits -= largest
        (total,) = self.sums(logits.exp().sum(1, keepdim=True))
        logits -= total.log_()
        return total.add_(largest)

    def gradient_(self, log_probs: Tensor, targets: Tensor, weights: Tensor, smoothing: float, drift: Tensor) -> None:
        """Turn the logarithms of probabilities into the gradient of the logits, in place.

        weights [rows, 1]: of each token's loss; drift: what its z-loss adds to that of its sum. Targets that are not
        here are other ranks'.
        """
        log_probs.exp_().mul_(weights + drift).sub_(weights * (smoothing / self.total))
        local = targets - self.start
        here = (local >= 0) & (local < log_probs.shape[1])
        at = local.clamp(0, log_probs.shape[1] - 1)
        log_probs.scatter_add_(1, at, torch.where(here, (smoothing - 1) * weights, 0))

    def at_targets(self, log_probs: Tensor, targets: Tensor) -> Tensor:
        """The logarithms of probabilities of the targets, on all ranks [rows, 1]."""
        local = targets - self.start
        here = (local >= 0) & (local < log_probs.shape[1])
        (found,) = self.sums(torch.where(here, log_probs.gather(1, local.clamp(0, log_probs.shape[1] - 1)), 0))
        return found
