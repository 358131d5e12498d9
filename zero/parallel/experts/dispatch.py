"""The forward of experts that ranks divide: tokens travel to the ranks of their experts, and back.

Each rank sends the tokens that its router gave others, in the order of experts, and computes for those that come. What
comes back is weighted and added up by the rank that has sent it, in the order in which the module adds in one process.
Its gradients take the same way back. D. Lepikhin et al., "GShard", 2020.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.core.comm import Axis
from zero.core.kept import kept
from zero.core.replaced_forward import ReplacedForward
from zero.core.torch_private import backward_task, without_modes
from zero.parallel import moves
from zero.parallel.experts.find import Experts
from zero.parallel.tensor.forward import has_dropout
from zero.plan.tensors import sizes_of

COUNTS = "expert counts"  # a message so long as the experts are many, whatever the micro-batch is
_BITS = 40  # of a count of tokens; above them stands the number of the module that is called


class Routes(NamedTuple):
    """How many rows go to each rank, and how many come; `told`: the latter by local expert [ranks, experts]."""

    sent: list[int]
    received: list[int]
    told: Tensor


class DispatchedForward(ReplacedForward):
    """The forward of one module of experts, of which this rank has a part.

    number: among those of the model; ranks: those that divide the experts; peers: those with the same tokens (tensor
    parallel), of which each sends a part; seen: the tokens of each local expert in training, since somebody looked;
    called: whether any forward was.
    """

    def __init__(self, found: Experts, ranks: Axis, peers: Axis, number: int = 0) -> None:
        super().__init__(found.module)
        self.number = number
        self.ranks, self.peers = ranks, peers
        self.seen: Tensor | None = None
        self.called = False
        self._found, self._local = found, found.count // ranks.size
        self._takes = inspect.signature(self.plain)
        self._compared = not found.stacks or has_dropout([*self.module.modules()])

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the module's own forward: the sum over k of weights [n, k] x experts [n, k] of tokens [n, width].

        It is never compiled, whoever calls it: what is exchanged has other sizes each time.
        """
        return (torch.compiler.disable(self._call) if torch.compiler.is_compiling() else self._call)(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Tensor:
        self.called = True
        x, index, weights, *more = self._takes.bind(*args, **kwargs).arguments.values()
        if more:
            raise TypeError(f"'{self._found.name}': experts over ranks take tokens, experts and weights, and no more")
        if self.peers.size == 1:
            return self._run(x, index, weights)
        how = self.peers, 0, sizes_of(len(x), self.peers.size)
        index = moves.part_of(index, *how)
        return moves.gathered(self._run(moves.split(x, *how), index, moves.split(weights, *how)), *how)

    def _run(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        slots, ids = index.shape[1], index.reshape(-1)
        order = ids.argsort(stable=True)
        routes = kept(lambda: self._routes(ids))
        order = order[: sum(routes.sent)]  # behind them are slots of no expert
        there, back = (self.ranks, routes.sent, routes.received), (self.ranks, routes.received, routes.sent)
        found = self._experts(moves.exchanged(x[order // slots], *there), routes.told)
        rows = moves.exchanged(found, *back)
        rows = rows.new_zeros(len(ids), *rows.shape[1:]).index_copy(0, order, rows)
        return self._added(rows.unflatten(0, index.shape), index, weights).to(x.dtype)

    def _routes(self, ids: Tensor) -> Routes:
        """Tell the other ranks how many tokens come: the one time that the host reads from the device."""
        counts = ids.new_zeros(self._found.count + 1, dtype=torch.long)
        counts.scatter_add_(0, ids.clamp(max=self._found.count), torch.ones_like(ids, dtype=torch.long))
        mine = counts[:-1].view(self.ranks.size, self._local)
        one = [1] * self.ranks.size
        calls = moves.all_to_all(mine + (self.number << _BITS), self.ranks, one, one, COUNTS)
        calls, told = calls[:, 0] >> _BITS, calls & ((1 << _BITS) - 1)
        if self.module.training and backward_task() < 0:  # and not once more where a forward is recomputed
            tokens = told.sum(0)
            self.seen = tokens if self.seen is None else self.seen + tokens
        sent, received, numbers = torch.stack([mine.sum(1), told.sum(1), calls]).tolist()
        if numbers != [self.number] * len(numbers):
            raise RuntimeError(
                f"expert_parallel: ranks {[*self.ranks.ranks]} call modules {numbers} of those with experts at the "
                f"same time, this one '{self._found.name}', number {self.number}; all have to call the same ones in "
                "the same order, also without tokens: leave out what skips layers at random"
            )
        return Routes(sent, received, told)

    def _experts(self, x: Tensor, told: Tensor) -> Tensor:
        """What this rank's experts give for tokens that came, without weights.

        Without any a token of zeros takes part, so that gradients come, and gather and reduce, in the order of others.
        """
        count = len(x)
        index = torch.arange(self._local, device=x.device).repeat(self.ranks.size)
        index = index.repeat_interleave(told.flatten(), output_size=count)[:, None]
        if not count:
            x, index = torch.cat([x, x.new_zeros(1, *x.shape[1:])]), index.new_zeros(1, 1)
        ones = x.new_ones(len(x), 1)
        out = self.plain(x, index, ones)
        if not self._compared:
            self._compare(x.detach(), index, out.detach())
        return out[:count]

    def _added(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's rows [n, k, width], in the order in which the module adds."""
        weighted = rows * weights[..., None]
        if self._found.by_slot:
            return weighted.sum(1)
        weighted = weighted.to(rows.dtype)
        order = index.argsort(dim=1, stable=True)[..., None].expand_as(weighted)
        found = torch.zeros_like(weighted[:, 0])
        for each in weighted.gather(1, order).unbind(1):
            found = found + each
        return found

    @torch.no_grad()
    def _compare(self, x: Tensor, index: Tensor, plain: Tensor) -> None:
        """Raise ValueError where the module's weights are not factors of what its experts give, as ours are."""
        halves = torch.full_like(x[:, :1], 0.5)
        with without_modes():  # which note what a forward computes, to find it again in its recomputation
            half = self.plain(x, index, halves)
        if not torch.allclose(half, plain * 0.5, rtol=1e-2, atol=1e-3 * float(plain.abs().max())):
            raise ValueError(
                f"expert_parallel: '{self._found.name}', a {type(self.module).__name__}, does not give the sum of "
                "weight x expert(token): half the weights do not give half of it; leave expert_parallel out"
            )
        self._compared = True
