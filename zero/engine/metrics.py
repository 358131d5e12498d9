"""Values of a measurement, put together over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch

from zero.core import comm
from zero.core.agree import agree
from zero.core.comm import Axis
from zero.core.tensors import map_leaves
from zero.data import Loader
from zero.data.position import BatchCounts

L = TypeVar("L", Loader, None)


class Metrics:
    """Measurements of `axis`, the data-parallel ranks. All methods but `follow` are collectives.

    device: of the messages.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis = axis
        self._device = device
        self._batch: BatchCounts | None = None  # the batch that one of the engine's loaders gave last

    def follow(self, loader: L) -> L:
        """Let `gather_for_metrics` know the batches of a loader, if there is one; returns the loader."""
        if loader is not None:
            loader.on_batch = self._began
        return loader

    def gather_for_metrics(self, nested: Any, total: int | None = None) -> Any:
        """`nested` with the values of all ranks in each tensor, on every rank, and without those of padded samples.

        nested: a tensor [n, ...] of n samples, any dtype, or tuples, lists, mappings and dataclasses of such; None
        stays None. n may differ between ranks, the other dimensions may not. The result is on the same device, without
        a graph, in the order of the dataset as the loader deals it out: rank 0's first sample, rank 1's first, ...

        Call it for each batch of `training_data` or `deepspeed_io`: what an uneven dataset is padded with is known
        then. For any other loader give `total`, the number of samples that the values of all ranks stand for, such as
        the size of the dataset for those of a whole pass dealt sample by sample, as torch's DistributedSampler does.
        Raises ValueError, on all ranks, for values that are of no whole batch, or that differ in shape between ranks.
        """
        leaves: list[Any] = []
        map_leaves(nested, lambda leaf: leaf if leaf is None else leaves.append(leaf))
        told = self._told("gather_for_metrics", leaves)
        gathered = iter([self._whole(leaf, _counts(index, told), total) for index, leaf in enumerate(leaves)])
        return map_leaves(nested, lambda leaf: leaf if leaf is None else next(gathered))

    def reduce(self, value: Any, op: Literal["mean", "sum"] = "mean") -> Any:
        """The mean or the sum over ranks of a number or a tensor of any shape, or of each in a nested value.

        Ranks are added up in their order, 16-bit floats in fp32, so all have the same bits. A tensor keeps its shape,
        device and dtype, but for the mean of integers, which is fp64, and the sum of booleans, which is int64; a number
        becomes a Python number. Raises ValueError, on all ranks, for shapes that differ between them.
        """
        if op not in ("mean", "sum"):
            raise ValueError(f'reduce(op=...): got {op!r}, wanted "mean" or "sum"')
        leaves: list[Any] = []
        map_leaves(value, lambda leaf: leaf if leaf is None else leaves.append(leaf))
        tensors = [leaf if isinstance(leaf, torch.Tensor) else _of_number(leaf) for leaf in leaves]
        for index, of_ranks in enumerate(zip(*self._told("reduce", tensors), strict=True)):
            if any(one != of_ranks[0] for one in of_ranks):
                raise ValueError(f"reduce: value {index} differs between ranks: {_listed(of_ranks)}")
        sums = (self._sum(tensor, op) for tensor in tensors)
        reduced = iter(
            [one if isinstance(leaf, torch.Tensor) else one.item() for leaf, one in zip(leaves, sums, strict=True)]
        )
        return map_leaves(value, lambda leaf: leaf if leaf is None else next(reduced))

    def _began(self, batch: BatchCounts) -> None:
        self._batch = batch

    def _told(self, caller: str, leaves: Sequence[Any]) -> list[list[Any]]:
        """[dtype, shape] of each leaf on each rank; ValueError on all ranks where one has something else."""
        wrong = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        mine = [[str(leaf.dtype), list(leaf.shape)] for leaf in leaves if isinstance(leaf, torch.Tensor)]
        told = agree([wrong, mine], self.axis)
        for rank, (others, found) in zip(self.axis.ranks, told, strict=True):
            if others:
                raise ValueError(f"{caller}: got {', '.join(others)} on rank {rank}; wanted tensors, or nested ones")
            if len(found) != len(told[0][1]):
                raise ValueError(f"{caller}: got {len(found)} values on rank {rank} and {len(told[0][1])} on the first")
        return [found for _, found in told]

    def _whole(self, leaf: torch.Tensor, counts: list[int], total: int | None) -> torch.Tensor:
        """The samples of all ranks in the order in which they were dealt, without padding."""
        turn, real = self._real(sum(counts), total)
        rows = [row[:count] for row, count in zip(self._rows(leaf, max(counts)), counts, strict=True)]
        places = [torch.arange(count) for count in counts]
        rounds = [(place // turn * len(counts) + rank) * turn + place % turn for rank, place in enumerate(places)]
        order = torch.cat(rounds).argsort()[:real]
        return torch.cat(rows)[order.to(rows[0].device)].to(leaf.device)

    def _real(self, count: int, total: int | None) -> tuple[int, int | None]:
        """Samples of a turn, and how many of `count` are no padding; None for all."""
        if total is not None:
            if not total <= count < total + self.axis.size:
                raise ValueError(
                    f"gather_for_metrics: got {count} samples with total={total}; wanted at least that many, and "
                    "less than one more for each rank: collect the values of a whole pass, or give the total of these"
                )
            return 1, total
        if self._batch is None:
            raise ValueError(
                "gather_for_metrics: no loader of this engine has given a batch, so it is not known which samples are "
                "padding; give total=, or take a loader of training_data or engine.deepspeed_io"
            )
        if self._batch.given not in (None, count):
            raise ValueError(
                f"gather_for_metrics: got {count} samples, and the last batch of this engine's loaders has "
                f"{self._batch.given} over all ranks; call it for each batch, before the next one, or give total="
            )
        return self._batch.turn, self._batch.real

    def _rows(self, leaf: torch.Tensor, longest: int) -> Iterator[torch.Tensor]:
        """Each rank's tensor [longest, ...], beyond its own samples filled with zeros."""
        mine = torch.zeros((longest, *leaf.shape[1:]), dtype=leaf.dtype, device=self._device)
        mine[: len(leaf)] = leaf.detach()
        # As bytes: not every backend knows every dtype.
        rows = comm.gather_scalars(mine.view(-1).view(torch.uint8), self.axis, "metrics")
        return (row.view(leaf.dtype).view(mine.shape) for row in rows)

    def _sum(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        floating = tensor.is_floating_point() or tensor.is_complex()
        wide = torch.promote_types(tensor.dtype, torch.float32) if floating else torch.int64
        rows = [row[0].to(wide) for row in self._rows(tensor[None], 1)]
        result = sum(rows[1:], start=rows[0])
        if op == "mean":
            result = (result if floating else result.double()) / self.axis.size
        kept = floating or (op == "sum" and tensor.dtype is not torch.bool)
        return result.to(tensor.device, tensor.dtype if kept else result.dtype)


def print_on_first(engine: Any, *values: Any, **how: Any) -> None:
    """Python's `print` on rank 0 of the job, written at once; nothing on the others."""
    if engine.global_rank == 0:
        print(*values, **{"flush": True, **how})


def _counts(index: int, told: list[list[Any]]) -> list[int]:
    """The number of samples that each rank has of leaf `index`, of which each has `told` [dtype, shape]."""
    of_ranks = [found[index] for found in told]
    if any(not shape for _, shape in of_ranks):
        raise ValueError(
            f"gather_for_metrics: value {index} has no dimension of samples; engine.reduce is for single numbers"
        )
    if any([dtype, shape[1:]] != [of_ranks[0][0], of_ranks[0][1][1:]] for dtype, shape in of_ranks):
        raise ValueError(
            f"gather_for_metrics: value {index} differs between ranks in more than its first dimension: "
            f"{_listed(of_ranks)}; pad it to one shape"
        )
    return [shape[0] for _, shape in of_ranks]


def _of_number(value: Any) -> Any:
    """A number as a tensor; anything else as it is, for `_told` to refuse."""
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    return value


def _listed(of_ranks: Sequence[Any]) -> str:
    return ", ".join(f"{shape} {dtype}" for dtype, shape in of_ranks)
