"""Ulysses: heads are exchanged for sequence, each rank attends with some heads over all positions, and back again.

Jacobs et al., "DeepSpeed Ulysses", 2023. Key and value heads that are fewer than the ranks are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from zero.core import comm
from zero.core.comm import Axis

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, axis: Axis, attention: Attention) -> Any:
    """`attention` of some heads over the whole sequence, from and to this rank's positions of all heads.

    query [rows, heads, size, dim], key, value [rows, heads or a divisor of them, size, dim]. Raises ValueError for
    heads that the ranks do not divide.
    """
    heads, fewer = query.shape[1], key.shape[1]
    if heads % axis.size:
        fitting = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ValueError(
            f"sequence_parallel_size: got {axis.size} with {heads} attention heads, which these ranks do not divide; "
            f'wanted one of {fitting}, or "zero": {{"context": {{"mode": "ring"}}}}, which takes any'
        )
    wanted = math.lcm(fewer, axis.size)
    repeats = (wanted if heads % wanted == 0 else heads) // fewer
    key, value = (each.repeat_interleave(repeats, 1) if repeats > 1 else each for each in (key, value))
    (out,) = _Exchange.apply(axis, False, attention(*_Exchange.apply(axis, True, query, key, value)))
    return out


class _Exchange(torch.autograd.Function):
    """All heads of some positions [rows, heads, size, dim] for some heads of all [rows, heads / n, n x size, dim]."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, to_heads: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.axis, ctx.to_heads = axis, to_heads
        return _exchange(tensors, axis, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_exchange(grads, ctx.axis, not ctx.to_heads)


def _exchange(tensors: tuple[torch.Tensor, ...], axis: Axis, to_heads: bool) -> tuple[torch.Tensor, ...]:
    """All tensors in one message to each rank."""
    ranks, dim = axis.size, 1 if to_heads else 2
    # [ranks, rows, heads / ranks, size, dim]: what each of them gets.
    parts = [each.unflatten(dim, (ranks, -1)).movedim(dim, 0) for each in tensors]
    flat = torch.cat([part.reshape(ranks, -1) for part in parts], 1).view(-1)
    counts = [flat.numel() // ranks] * ranks
    came = comm.exchange(flat, counts, counts, axis, "heads of attention").view(ranks, -1)
    split = came.split([part[0].numel() for part in parts], 1)
    whole = (each.view(part.shape).movedim(0, 3 - dim) for each, part in zip(split, parts, strict=True))
    return tuple(each.flatten(3 - dim, 4 - dim) for each in whole)
