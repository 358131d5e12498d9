"""The loss of ranks that share a sequence, from those of their pieces, each of which weighs what it counts."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from zero.core import comm
from zero.core.comm import Axis
from zero.core.micro_batches import weighted
from zero.core.tensors import find_loss


def loss_in(output: Any) -> torch.Tensor | None:
    """The loss that a model returned, as `find_loss`, but no tensor of one dim, and nothing out of a list."""
    loss = None if isinstance(output, list) else find_loss(output)
    return loss if loss is not None and not loss.ndim else None


def count_in(output: Any) -> float | None:
    """The count of a model that returned (loss, count); None where it returned something else."""
    if not isinstance(output, tuple) or len(output) != 2 or isinstance(output[1], bool):
        return None
    count = output[1]
    scalar = isinstance(count, torch.Tensor) and not count.ndim and not count.requires_grad
    return float(count) if scalar or isinstance(count, (int, float)) else None


def combined(output: Any, loss: torch.Tensor, count: float, sums: bool, axis: Axis) -> Any:
    """The output with the loss of all pieces (their sum if `sums`, else their mean by counts) and the sum of counts."""
    if not sums and not count:
        loss = weighted(loss, 0.0).to(loss.dtype)  # whatever a mean over nothing is
    loss, total = _Combined.apply(loss, count, sums, axis)
    if isinstance(output, torch.Tensor):
        return loss
    if count_in(output) is not None:
        told = output[1]
        return loss, total.to(told) if isinstance(told, torch.Tensor) else type(told)(total)
    if isinstance(output, tuple):
        return output._replace(loss=loss) if hasattr(output, "loss") else (loss, *output[1:])
    if isinstance(output, MutableMapping):
        output["loss"] = loss
    else:
        output.loss = loss
    return output


class _Combined(torch.autograd.Function):
    """The mean of the ranks' losses by their counts, or their sum; and the sum of counts.

    The same on all ranks, each of which has its backward: so a gradient is multiplied by the number of ranks, as by
    torch's differentiable all-gather, and the mean over ranks is right for both.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, count: float, sums: bool, axis: Axis
    ) -> tuple[torch.Tensor, torch.Tensor]:
        told = torch.stack([loss.double(), loss.new_tensor(count, dtype=torch.float64)])
        values, counts = comm.gather_scalars(told, axis, "loss").unbind(1)
        total = counts.sum()
        ctx.mark_non_differentiable(total)
        if sums:
            ctx.factor = float(axis.size)
            return values.sum().to(loss.dtype), total
        ctx.factor = count / total.item() * axis.size if count else 0.0
        return ((values * counts).sum() / total).to(loss.dtype), total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        return grad * ctx.factor, None, None, None
