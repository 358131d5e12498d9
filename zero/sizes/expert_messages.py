"""What ranks that experts are divided among have and receive, before a run.

How many tokens each expert gets is not known then: the messages are of routers that give all equally many, and the
buffers of others, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero.parallel.experts.dispatch import COUNTS, DispatchedForward, Routes
from zero.plan.tensors import sizes_of

IMBALANCES = (1, 2, 3, 4)  # tokens of the fullest rank beside the mean


class PlannedForward(DispatchedForward):
    """The forward of experts on the meta device, of ranks that are not there: all experts get equally many tokens.

    rows: how often a forward of this rank sends a token to an expert; nbytes: of one such row; most: rows that this
    rank may get, all tokens of all ranks.
    """

    rows = nbytes = most = 0

    def _run(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.rows, self.nbytes = index.numel(), x[:1].nbytes
        self.most = self.ranks.size * len(x) * min(index.shape[1], self._local)
        return super()._run(x, index, weights)

    def _routes(self, ids: Tensor) -> Routes:
        told = torch.empty(self.ranks.size, self._local, dtype=torch.long, device=ids.device)
        self.ranks.watchdog.begin(COUNTS, "", told[1:].nbytes, self.ranks.ranks)
        sent = sizes_of(len(ids), self.ranks.size)
        return Routes(sent, sent[:1] * self.ranks.size, told)

    def _experts(self, x: Tensor, told: Tensor) -> Tensor:
        """Something with a graph to the tokens and to what is trained; the module may ask for values."""
        return sum((each.sum() for each in self.module.parameters() if each.requires_grad), start=x * 1)

    def received(self) -> list[int]:
        """The largest buffer that this rank receives, in bytes: at each of the imbalances, and at worst."""
        return [min(self.rows * times, self.most) * self.nbytes for times in (*IMBALANCES, self.ranks.size)]
