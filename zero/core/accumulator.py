"""Where the reduced gradient of one unit adds up over backwards, on the device: as a plain sum or as a tree.

In host memory the same is done by zero/memory/host_gradients.py.
"""

from __future__ import annotations

import torch

from zero.core.comm import Inbox
from zero.core.tree import Leaf, Tree


class DeviceAccumulator:
    """A sum over ranks and micro-batches [n], the rank's shard, in `kept`: fp32, or rounded to it after each sum."""

    def __init__(self, kept: torch.dtype) -> None:
        self.kept = kept
        self._sum: torch.Tensor | None = None

    @property
    def held(self) -> bool:
        """Whether anything was added since `clear`."""
        return bool(self.parts())

    def add_rows(self, inbox: Inbox) -> bool:
        """Add the sum of these rows without memory of its own for it; False where that cannot be."""
        if self._adds_in_place:
            inbox.sum(self._sum, True)
            return True
        if len(inbox.rows) > 1 or inbox.rows[0].dtype != self.kept:
            return False
        inbox.arrive()
        self.add(inbox.rows[0])
        return True

    def add(self, total: torch.Tensor) -> None:
        """Add a sum over all ranks; the tensor belongs to us from now on."""
        if self._sum is None:
            self._sum = total.to(self.kept)
        else:
            self._sum.add_(total)

    def total(self) -> torch.Tensor | None:
        """The sum, the storage itself."""
        return self._sum

    def hand_over(self) -> torch.Tensor:
        """The sum, to be used up; nothing is written into it before `clear` and the next `add`."""
        total, self._sum = self.total(), None
        return total

    def squares(self) -> torch.Tensor | None:
        """The sum of the squares of the total where that is known without a look at it: not here."""

    def parts(self) -> list[torch.Tensor]:
        """The sums [n], one or several."""
        return [] if self._sum is None else [self._sum]

    def finite_as(self) -> list[torch.Tensor]:
        """Tensors that are finite exactly where what is held is."""
        return self.parts()

    def clear(self) -> torch.Tensor | None:
        """Forget the sum; returns its memory, which others may use."""
        total, self._sum = self._sum, None
        return total

    @property
    def _adds_in_place(self) -> bool:
        return self._sum is not None and self.kept == torch.float32


class TreeAccumulator(DeviceAccumulator):
    """Adds ranks and micro-batches in the order of a fixed tree (zero/core/tree.py).

    There is one over the micro-batches' first backwards, one over their second ones: each backward is reduced by
    itself, so a micro-batch that runs two of them is two leaves, of two trees. These are added in their order at the
    end. Reading the total ends the trees: what comes later is added to it as a whole.

    leaf: which backward is being added.
    """

    _adds_in_place = False

    def __init__(self, kept: torch.dtype) -> None:
        super().__init__(kept)
        self.leaf = Leaf()
        self._trees: dict[int, Tree[torch.Tensor]] = {}

    def add(self, total: torch.Tensor) -> None:
        tree = self._trees.setdefault(self.leaf.backward, Tree(torch.Tensor.add_))
        tree.put(self.leaf.micro_batch, total)

    def total(self) -> torch.Tensor | None:
        trees, self._trees = self._trees, {}
        for backward in sorted(trees):
            total = trees[backward].take()
            self._sum = total if self._sum is None else self._sum.add_(total)
        if trees:
            # Zeros are sent where a rank has no gradient, and nothing where no rank runs: so that -0.0 + 0.0 and
            # -0.0 alone do not differ, no sum is left at -0.0.
            self._sum.add_(0.0)
        return self._sum

    def parts(self) -> list[torch.Tensor]:
        return [*super().parts(), *(value for tree in self._trees.values() for value in tree.values)]

    def clear(self) -> torch.Tensor | None:
        self._trees = {}
        return super().clear()
