"""Collectives of activations between parts of a model: one in the forward, and its transpose in the backward.

A tensor that is whole is the same on all ranks along the axis, and so is its gradient; of one that is a partial sum,
the sum over the ranks is meant, and of one that is cut, each rank has a part along a dim. M. Shoeybi et al.,
"Megatron-LM", 2019 (f, g), and V. Korthikanti et al., "Reducing activation recomputation", 2022 (sequences).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero.core import comm
from zero.core.comm import Axis, all_gather_single, reduce_scatter_single


def copied(x: Tensor, axis: Axis) -> Tensor:
    """A whole tensor that each rank uses for its part: itself; its gradient is the sum of theirs."""
    return _Moved.apply(x, _same, _all_reduced, axis) if torch.is_grad_enabled() and x.requires_grad else x


def summed(x: Tensor, axis: Axis) -> Tensor:
    """The sum of the ranks' partial ones, which is whole. Overwrites `x` where it can."""
    return _Summed.apply(x, axis)


def gathered(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """The whole tensor, from parts of these sizes along `dim`."""
    return _Moved.apply(x, all_gather, part_of, axis, dim % x.ndim, sizes)


def split(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part of a whole tensor."""
    return _Moved.apply(x, part_of, all_gather, axis, dim % x.ndim, sizes)


def summed_and_split(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part of the sum of partial ones."""
    return _Moved.apply(x, reduce_scatter, all_gather, axis, dim % x.ndim, sizes)


def regathered(x: Tensor, whole: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """`whole`, gathered from `x` before, for uses of which each rank has a part: its gradient is a partial sum."""
    return _Moved.apply(x, lambda *_: _same(whole), reduce_scatter, axis, dim % x.ndim, sizes)


def exchanged(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """The rows that the ranks send this one, so many of each; of `x` they get so many, one rank after the other."""
    return _Moved.apply(x, all_to_all, lambda x, *_: all_to_all(x, axis, received, sent), axis, sent, received)


def added_once(x: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    """A partial sum with a whole bias, which the first rank adds; the gradient of the bias is whole on each rank."""
    return _AddedOnce.apply(x, bias, axis.rank == 0)


def keep_out_compiler() -> None:
    """From now on, compiled code calls what moves tensors as it is. Imports the compiler, which takes over a second."""
    for move in (copied, summed, gathered, split, summed_and_split, regathered, added_once):
        if globals()[move.__name__] is move:
            globals()[move.__name__] = torch.compiler.disable(move)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks in place of `x`, which is contiguous; blocking, as far as the current stream."""
    if axis.size == 1:
        return x
    sent = _sent(x, axis)
    _exchange("layer sum", 2 * sent.nbytes * (axis.size - 1) // axis.size, axis, partial(dist.all_reduce, sent))
    return x if sent is x else x.copy_(sent)


def all_gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts of all ranks, of these sizes along `dim`, one after the other."""
    if axis.size == 1:
        return x
    most = max(sizes)
    rows = x.movedim(dim, 0).contiguous()
    if len(rows) < most:
        rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    sent = _sent(rows, axis)
    out = sent.new_empty(axis.size * most, *sent.shape[1:])
    _exchange("layer gather", sent.nbytes * (axis.size - 1), axis, partial(all_gather_single, out, sent))
    if min(sizes) < most:
        out = torch.cat([part[:size] for part, size in zip(out.split(most), sizes, strict=True)])
    return out.to(x.device).movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part of the sum over ranks."""
    if axis.size == 1:
        return x
    most = max(sizes)
    rows = x.movedim(dim, 0)
    if min(sizes) < most:
        filled = rows.new_zeros(axis.size, most, *rows.shape[1:])
        for row, part in zip(filled, rows.split(list(sizes)), strict=True):
            row[: len(part)] = part
        rows = filled.flatten(0, 1)
    sent = _sent(rows.contiguous(), axis)
    out = sent.new_empty(most, *sent.shape[1:])
    _exchange("layer scatter", out.nbytes * (axis.size - 1), axis, partial(reduce_scatter_single, out, sent))
    return out[: sizes[axis.rank]].to(x.device).movedim(0, dim).contiguous()


def all_to_all(
    x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int], what: str = "expert exchange"
) -> Tensor:
    """The rows that the ranks send this one. What has other sizes has another name: so they never meet over gloo."""
    row = x.shape[1:].numel()
    flat = comm.exchange(x.flatten(), [row * each for each in sent], [row * each for each in received], axis, what)
    return flat.view(-1, *x.shape[1:]) if row else x.new_empty(sum(received), *x.shape[1:])


def part_of(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part, with memory of its own."""
    return x.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).clone(memory_format=torch.contiguous_format)


def assembled(x: Tensor, axis: Axis | None, dim: int, ranges: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """The whole tensor of which each rank has these ranges of starts and sizes along `dim`; NaN where no rank is."""
    shape = [*x.shape]
    shape[dim] = max(start + size for each in ranges for start, size in each)
    full = x.new_full(shape, float("nan"))
    sizes = [sum(size for _, size in each) for each in ranges]
    if axis is not None:
        for part, each in zip(all_gather(x, axis, dim, sizes).split(sizes, dim), ranges, strict=True):
            for (start, size), piece in zip(each, part.split([size for _, size in each], dim), strict=True):
                full.narrow(dim, start, size).copy_(piece)
    return full


def _exchange(what: str, leaves: int, axis: Axis, start: Callable[..., Any]) -> None:
    """Note a collective of which `leaves` bytes leave this rank, as in a ring, and do it; not of a plan's ranks."""
    collective = axis.watchdog.begin(what, "", leaves, axis.ranks, attends=True)
    if axis.group_ref is None:
        return
    with axis.watchdog.sending(collective):
        work = start(group=axis.group, async_op=True)
    axis.watchdog.wait((work,), collective)


def _same(x: Tensor, *_: Any) -> Tensor:
    return x.view_as(x)


def _all_reduced(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def _sent(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.native or not x.is_cuda else x.cpu()  # gloo sends from host memory only


class _Moved(torch.autograd.Function):
    """A move in the forward, and its transpose in the backward; `how`: what both take besides the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *how: Any) -> Tensor:
        ctx.back, ctx.how = back, how
        return there(x, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.back(grad, *ctx.how), None, None, *[None] * len(ctx.how)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        # A view shares memory that others may read.
        if x._is_view() or not x.is_contiguous() or (x.is_leaf and x.requires_grad):
            return _all_reduced(x, axis)
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class _AddedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, here: bool) -> Tensor:
        ctx.dtype = bias.dtype
        return x + bias if here else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # In the order of plain torch's: one sum over all but the last dim.
        return grad, grad.sum_to_size(grad.shape[-1:]).to(ctx.dtype), None
