"""Sums in a fixed binary tree over the positions of their leaves, here over the micro-batches of one optimizer step.

Two leaves meet in the smallest subtree that holds both, so who adds first follows from their positions and not
from how many ranks share the work: a subtree of 2^k leaves may as well be one rank's 2^k micro-batches or the
same micro-batch of 2^k ranks. A position that never comes counts as nothing.

Micro-batch number s = a x W + r of the step is the a-th of rank r of W. The lowest levels of the tree are the
rows that the ranks send each other, the others are the micro-batches that follow each other. As W is a power of
two, both parts together are one tree over s, whatever W is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from zero.kernels.bucket import sum_rows

T = TypeVar("T")


class Tree(Generic[T]):
    """Adds leaves of rising positions; keeps one partial sum for each finished subtree: about log2 of the leaves.

    `add` gets the left sum and the right one; it may reuse their memory.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        # The position of its first leaf, and the sum, of each subtree from left to right, each larger than the next.
        self._nodes: list[tuple[int, T]] = []

    @property
    def values(self) -> list[T]:
        """The partial sums, from left to right."""
        return [value for _, value in self._nodes]

    def put(self, position: int, leaf: T) -> None:
        """Add a leaf. Raises ValueError for a position that is not behind all before it."""
        last = self._nodes[-1][0] if self._nodes else -1
        if position <= last:
            raise ValueError(f"position: got {position}; wanted one behind {last}")
        self._close(position)
        self._nodes.append((position, leaf))
        self._close(position + 1)

    def take(self) -> T | None:
        """The sum of all leaves, None if there were none; the tree is empty afterwards."""
        self._close(None)
        return self._nodes.pop()[1] if self._nodes else None

    def _close(self, end: int | None) -> None:
        """Add up the subtrees to which no leaf from position `end` on belongs; None: all of them."""
        while len(self._nodes) > 1:
            (left, first), (right, second) = self._nodes[-2:]
            level = (left ^ right).bit_length()  # the subtree where they meet has 2^level leaves
            if end is not None and (left >> level) + 1 << level > end:
                return
            self._nodes[-2:] = [(left, self._add(first, second))]


class Leaf(NamedTuple):
    """Which backward it is: the index of its micro-batch in the optimizer step, and its index among those of that."""

    micro_batch: int = 0
    backward: int = 0


def sum_tree(rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """out [n] fp32 = ((rows[0] + rows[1]) + (rows[2] + rows[3])) + ..., a power of two of rows; `out` is none of them.

    The rows are read only; at most log2 of their number x n elements are held beside them.
    """
    if len(rows) <= 2:
        sum_rows(rows, out, False)
        return
    half = len(rows) // 2
    right = torch.empty_like(out)
    sum_tree(rows[:half], out)
    sum_tree(rows[half:], right)
    sum_rows([out, right], out, False)
