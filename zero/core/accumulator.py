"""Where the reduced gradient of one unit adds up over backwards: on the device, as a tree, or in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from zero.core.comm import Inbox
from zero.core.tree import Leaf, Partials
from zero.memory.host_gradients import HostGradAccumulator


class Accumulator(Protocol):
    """A sum over ranks and micro-batches [n], the rank's shard; `leaf`: which backward is being added."""

    leaf: Leaf

    @property
    def held(self) -> bool:
        """Whether anything was added since `clear`."""

    def add_rows(self, inbox: Inbox) -> bool:
        """Add the sum of these rows without memory of its own for it; False where that cannot be."""

    def add(self, total: torch.Tensor) -> None:
        """Add a sum over all ranks; the tensor belongs to us from now on."""

    def total(self) -> torch.Tensor | None:
        """The sum, the storage itself."""

    def hand_over(self) -> torch.Tensor:
        """The sum, for whoever uses it up; nothing is written into it before `clear` and the next `add`."""

    def squares(self) -> torch.Tensor | None:
        """The sum of the squares of the total, fp64 on the device, where that is known without a look at it."""

    def parts(self) -> Sequence[torch.Tensor]:
        """What is held, in one or several sums [n]."""

    def finite_as(self) -> Sequence[torch.Tensor]:
        """Tensors that are finite exactly where what is held is."""

    def clear(self) -> torch.Tensor | None:
        """Forget the sum; returns its memory where another may use it."""


class DeviceAccumulator:
    """Adds up on the device, in `kept`: fp32, or rounded to it after each sum."""

    def __init__(self, kept: torch.dtype) -> None:
        self.leaf = Leaf()
        self.kept = kept
        self._sum: torch.Tensor | None = None

    @property
    def held(self) -> bool:
        """See `Accumulator`."""
        return self._sum is not None

    def add_rows(self, inbox: Inbox) -> bool:
        """See `Accumulator`."""
        if self._sum is not None and self.kept == torch.float32:
            inbox.sum(self._sum, True)
            return True
        if len(inbox.rows) > 1 or inbox.rows[0].dtype != self.kept:
            return False
        inbox.arrive()
        self.add(inbox.rows[0])
        return True

    def add(self, total: torch.Tensor) -> None:
        """See `Accumulator`."""
        if self._sum is None:
            self._sum = total.to(self.kept)
        else:
            self._sum.add_(total)

    def total(self) -> torch.Tensor | None:
        """See `Accumulator`."""
        return self._sum

    def hand_over(self) -> torch.Tensor:
        """See `Accumulator`."""
        total, self._sum = self._sum, None
        return total

    def squares(self) -> None:
        """See `Accumulator`."""

    def parts(self) -> list[torch.Tensor]:
        """See `Accumulator`."""
        return [] if self._sum is None else [self._sum]

    finite_as = parts

    def clear(self) -> torch.Tensor | None:
        """See `Accumulator`."""
        total, self._sum = self._sum, None
        return total


class TreeAccumulator(DeviceAccumulator):
    """Adds ranks and micro-batches in the order of a fixed tree (zero/core/tree.py), on the device.

    Whoever reads the total ends the tree: what comes later is added to it as a whole.
    """

    def __init__(self, kept: torch.dtype) -> None:
        super().__init__(kept)
        self._partials = Partials()

    @property
    def held(self) -> bool:
        """See `Accumulator`."""
        return bool(self.parts())

    def add_rows(self, inbox: Inbox) -> bool:
        """See `Accumulator`."""
        if len(inbox.rows) > 1 or inbox.rows[0].dtype != self.kept:
            return False
        inbox.arrive()
        self.add(inbox.rows[0])
        return True

    def add(self, total: torch.Tensor) -> None:
        """See `Accumulator`."""
        self._partials.put(self.leaf, total)

    def total(self) -> torch.Tensor | None:
        """See `Accumulator`."""
        self._sum = self._partials.take(self._sum)
        return self._sum

    def hand_over(self) -> torch.Tensor:
        """See `Accumulator`."""
        self.total()
        return super().hand_over()

    def parts(self) -> list[torch.Tensor]:
        """See `Accumulator`."""
        return [*super().parts(), *self._partials.values]

    finite_as = parts

    def clear(self) -> torch.Tensor | None:
        """See `Accumulator`."""
        self._partials = Partials()
        return super().clear()


class HostAccumulator:
    """Adds up in host memory, which each sum reaches while the backward goes on."""

    def __init__(self, memory: HostGradAccumulator) -> None:
        self.leaf = Leaf()
        self._memory = memory

    @property
    def held(self) -> bool:
        """See `Accumulator`."""
        return self._memory.has_sum

    def add_rows(self, inbox: Inbox) -> bool:
        """See `Accumulator`."""
        if len(inbox.rows) > 1:
            return self._memory.add_in_place(inbox.sum)
        inbox.arrive()
        self._memory.add(inbox.rows[0])
        return True

    def add(self, total: torch.Tensor) -> None:
        """See `Accumulator`."""
        self._memory.add(total)

    def total(self) -> torch.Tensor | None:
        """See `Accumulator`."""
        return self._memory.tensor() if self._memory.has_sum else None

    hand_over = total  # the storage, which the next sum will use: that one waits for the update

    def squares(self) -> torch.Tensor | None:
        """See `Accumulator`."""
        return self._memory.squares if self._memory.has_sum else None

    def parts(self) -> list[torch.Tensor]:
        """See `Accumulator`."""
        return [self._memory.tensor()] if self._memory.has_sum else []

    def finite_as(self) -> list[torch.Tensor]:
        """See `Accumulator`; for what came from a device that is one number there, so that nobody waits for it."""
        known = self._memory.squares_added
        return self.parts() if known is None else [known]

    def clear(self) -> None:
        """See `Accumulator`."""
        self._memory.clear()
