"""The order of a sum that depends on positions alone: a binary tree over them, built while its leaves arrive.

Two leaves meet in the smallest subtree that holds both, so who adds first follows from their positions and not
from how many ranks share the work: a subtree of 2^k leaves may as well be one rank's 2^k micro-batches or the
same micro-batch of 2^k ranks. A position that never comes counts as nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple, Generic[T]):
    """The sum over a subtree, and the position of its first leaf."""

    first: int
    value: T


class Tree(Generic[T]):
    """Adds leaves of rising positions; keeps one partial sum for each finished subtree: about log2 of the leaves.

    `add` gets the left sum and the right one; it may reuse their memory.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._nodes: list[Node[T]] = []  # from left to right, each subtree larger than the next

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def values(self) -> list[T]:
        """The partial sums, from left to right."""
        return [node.value for node in self._nodes]

    def put(self, position: int, leaf: T) -> None:
        """Add a leaf. Raises ValueError for a position that is not behind all before it."""
        if position < 0 or (self._nodes and position <= self._nodes[-1].first):
            raise ValueError(f"position: got {position}; wanted one behind {self._nodes[-1].first if self else -1}")
        self._close(position)
        self._nodes.append(Node(position, leaf))
        self._close(position + 1)

    def take(self) -> T | None:
        """The sum of all leaves, None if there were none; the tree is empty afterwards."""
        self._close(None)
        return self._nodes.pop().value if self._nodes else None

    def _close(self, end: int | None) -> None:
        """Add up the subtrees to which no leaf from position `end` on belongs; None: all of them."""
        while len(self._nodes) > 1:
            left, right = self._nodes[-2:]
            level = (left.first ^ right.first).bit_length()  # the subtree where they meet has 2^level leaves
            if end is not None and (left.first >> level) + 1 << level > end:
                return
            self._nodes[-2:] = [Node(left.first, self._add(left.value, right.value))]
