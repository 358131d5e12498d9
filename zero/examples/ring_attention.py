"""Ring attention as it is taught: scores of all keys are held [rows, heads, size, length], and whole parts go round.

Li et al., "Sequence Parallelism: Long Sequence Training from System Perspective", 2021. Each rank has one run of
positions, in the order of ranks. Keys go round in W - 1 sends, then values in W - 1; `zero.attention` sends less, holds
no scores, and is what models should call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, causal: bool = True
) -> torch.Tensor:
    """Attention of this rank's queries [rows, heads, size, dim] to the keys and values of all ranks of the group."""
    scores = RingQK.apply(query * query.shape[-1] ** -0.5, key, group)
    if causal:
        size = query.shape[2]
        last = torch.arange(size, device=query.device) + dist.get_rank(group) * size
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=query.device) > last[:, None], -torch.inf)
    return RingAV.apply(scores.softmax(-1), value, group)


class RingQK(torch.autograd.Function):
    """Products of this rank's queries [rows, heads, size, dim] with all keys [rows, heads, size, length]."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Keep what is here, and see all keys in turn."""
        ctx.save_for_backward(query, key)
        ctx.group = group
        return torch.cat([query @ each.mT for each in in_order(key, group)], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Keys go round again; what each rank finds for a key is added up where that is."""
        query, key = ctx.saved_tensors
        parts = grad.split(key.shape[2], -1)
        of_query = sum(part @ each for part, each in zip(parts, in_order(key, ctx.group), strict=True))
        return of_query, summed([part.mT @ query for part in parts], ctx.group), None


class RingAV(torch.autograd.Function):
    """Sums of all values by this rank's weights [rows, heads, size, length]."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Keep what is here, and see all values in turn."""
        ctx.save_for_backward(weights, value)
        ctx.group = group
        parts = weights.split(value.shape[2], -1)
        return sum(part @ each for part, each in zip(parts, in_order(value, group), strict=True))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Values go round again; what each rank finds for a value is added up where that is."""
        weights, value = ctx.saved_tensors
        of_weights = torch.cat([grad @ each.mT for each in in_order(value, ctx.group)], -1)
        parts = weights.split(value.shape[2], -1)
        return of_weights, summed([part.mT @ grad for part in parts], ctx.group), None


def in_order(own: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensors of all ranks, by rank."""
    parts = list(around(own, group))
    rank = dist.get_rank(group)
    return [parts[rank - source] for source in range(len(parts))]


def around(own: torch.Tensor, group: dist.ProcessGroup) -> Iterator[torch.Tensor]:
    """This rank's tensor, then that of the rank before it, and so on: each sends on what it has, W - 1 times."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    yield own
    for _ in range(size - 1):
        own = pass_on(own.contiguous(), (rank + 1) % size, (rank - 1) % size, group)
        yield own


def pass_on(own: torch.Tensor, to: int, source: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Send a tensor to one rank, and return that of another."""
    came = torch.empty_like(own)
    send = dist.P2POp(dist.isend, own, group=group, group_peer=to)
    receive = dist.P2POp(dist.irecv, came, group=group, group_peer=source)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return came


def summed(parts: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part, added up over the ranks."""
    whole = torch.stack(parts)
    dist.all_reduce(whole, group=group)
    return whole[dist.get_rank(group)]
