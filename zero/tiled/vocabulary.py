"""The tiled loss where each rank has some rows of the head: M. Shoeybi et al., "Megatron-LM", 2019, section 3.

Ranks exchange a few numbers of each token, never logits, and add them up in their order: all have the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zero.core import comm
from zero.core.comm import Axis
from zero.core.owner import cut_of, owner_of


class Vocabulary(NamedTuple):
    """The rows of a head that are here: [start, start + n) of `total`; `axis`: of the ranks that have the others."""

    start: int
    total: int
    axis: Axis

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None) -> Vocabulary | None:
        """That of a head, None where all rows are here; ValueError where it is cut otherwise or summed by a tree."""
        found = {name: _rows(name, each) for name, each in (("weight", weight), ("bias", bias)) if each is not None}
        if len({each and each[:2] for each in found.values()}) > 1:
            said = " and ".join(f"{name} {each[:2] if each else 'all'}" for name, each in found.items())
            raise ValueError(f"tiled_cross_entropy: got {said} of (first row, of all rows); wanted the same rows")
        return found["weight"]

    def normalize(self, logits: Tensor, targets: Tensor, smooth: bool) -> Tensor:
        """Turn this rank's logits [tokens, n] into exponentials of how far they are from the token's largest.

        targets: [tokens, 1]. Returns [4, tokens, 1], over all rows: logarithms of the targets' probabilities, and of
        the sums that logits are normalized by, with `smooth` the sums of all logarithms of probabilities, and what
        exponentials are still to be divided by. Collective.
        """
        at, here = self._places(targets, logits)
        of_target = torch.where(here, logits.gather(1, at), -torch.inf)  # or another rank has it
        largest, of_target = self._gathered(logits.amax(1, keepdim=True), of_target).amax(0)
        logits -= largest
        spread = logits.sum(1, keepdim=True) if smooth else torch.zeros_like(largest)
        sums, spread = self._gathered(logits.exp_().sum(1, keepdim=True), spread).sum(0)
        log = sums.log()
        return torch.stack([of_target - largest - log, largest + log, spread - self.total * log, sums])

    def differentiate(self, made: Tensor, targets: Tensor, factor: Tensor, weights: Tensor, smoothing: float) -> None:
        """Turn the exponentials, times `factor`, into the gradient of the logits in place; weights: of each loss."""
        made *= factor
        if smoothing:
            made -= weights * (smoothing / self.total)
        at, here = self._places(targets, made)
        made.scatter_add_(1, at, torch.where(here, (smoothing - 1) * weights, 0))

    def _places(self, targets: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
        """Where the targets are among these rows, some row for those that are not, and whether they are."""
        local = targets - self.start
        return local.clamp(0, of.shape[1] - 1), (local >= 0) & (local < of.shape[1])

    def _gathered(self, *columns: Tensor) -> Tensor:
        """[ranks, columns, tokens, 1]"""
        values = torch.stack(columns)
        rows = comm.gather_scalars(values.flatten(), self.axis, "loss of a vocabulary", read=False)
        return rows.view(-1, *values.shape)


def _rows(name: str, param: Tensor) -> Vocabulary | None:
    if (cut := cut_of(param)) is None or cut.boxes[0].sizes == cut.shape:
        return None
    owner, said = owner_of(param), f"tiled_cross_entropy({name}=...): got a part of a {name} {cut.shape}"
    axis = owner.unit.mesh.peers if owner is not None and hasattr(owner.unit, "engine") else None
    if len(cut.boxes) != 1 or cut.boxes[0].sizes[1:] != cut.shape[1:] or axis is None or axis.size == 1:
        raise ValueError(f"{said}; wanted some of its rows, cut over the ranks of an engine")
    engine = owner.unit.engine()
    if engine is not None and engine._config.tensor_parallel.reduce == "tree":
        raise ValueError(f"{said} with tensor_parallel.reduce 'tree', whose sums a tiled loss has not; set 'sum'")
    return Vocabulary(cut.boxes[0].offset[0], cut.shape[0], axis)
