"""When gradients travel: each unit once per backward, in one order on all ranks, none left out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from zero.core.unit import Unit
from zero.plan.sharding import Sharding


class Reducer:
    """Takes gradients from autograd as they land and reduces units in the reverse order of registration.

    A unit fires when its last gradient is there and all before it in the order have fired; what is open at
    the end of a backward is flushed, with zeros where no gradient came. So every rank sends the same
    sequence, whatever its own graph used.

    boundary: whether the backward that runs is the last of its accumulation window (set by the engine).
    """

    def __init__(self, units: Sequence[Unit], sharding: Sharding, on_complete: Callable[[Unit], None]) -> None:
        self.boundary = True
        self.open = False  # a backward has begun and was not flushed yet
        self.rounds = 0  # backward passes flushed so far
        self._order = [unit for unit in reversed(units) if unit.gradients is not None]
        self._every_micro_batch = sharding.grads
        self._on_complete = on_complete
        self._on_flush: list[Callable[[], None]] = []
        self._next = 0  # first unit of the order that has not fired in this backward
        self._travelling: list[Unit] = []
        self._handles = [
            param.register_post_accumulate_grad_hook(self._hook(position, index))
            for position, unit in enumerate(self._order)
            for index, param in enumerate(unit.params)
        ]

    def on_flush(self, call: Callable[[], None]) -> None:
        """Have `call` run at the end of every backward, after the gradients."""
        self._on_flush.append(call)

    def begin(self) -> None:
        """Note that a backward runs, and ask autograd to tell when it has ended."""
        if not self.open:
            self.open = True
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)

    def flush(self) -> None:
        """End a backward: fire what has not fired, in order, and wait until all sums are there."""
        if self._fires:
            while self._next < len(self._order):
                self._fire(self._order[self._next])
            for unit in self._travelling:
                unit.gradients.finish()
        for unit in self._order:
            unit.gradients.begin_round()
        self._travelling = []
        self._next = 0
        self.open = False
        self.rounds += 1
        for call in self._on_flush:
            call()

    def before_step(self) -> None:
        """Reduce what no backward has: local sums whose boundary came without one, and zeros where nothing is left."""
        if any(unit.gradients.flat is not None or unit.gradients.shard is None for unit in self._order):
            self.flush()

    def abandon(self) -> None:
        """After an exception: forget the gradients of this accumulation window."""
        for unit in self._order:
            unit.gradients.drop()
        self._travelling = []
        self._next = 0
        self.open = False

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    @property
    def _fires(self) -> bool:
        return self._every_micro_batch or self.boundary

    def _hook(self, position: int, index: int) -> Callable[[nn.Parameter], None]:
        # Weak, because the parameter outlives the engine when `destroy` was not called. Nor may it hold the unit, which
        # holds the parameter: the garbage collector does not see into these hooks, and would never collect the circle.
        this = weakref.ref(self)

        def arrived(param: nn.Parameter) -> None:
            reducer = this()
            if reducer is not None:
                reducer._arrived(reducer._order[position], index, param)

        return arrived

    def _arrived(self, unit: Unit, index: int, param: nn.Parameter) -> None:
        grad, param.grad = param.grad, None
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"parameter '{unit.plan.params[index].name}' has a {grad.layout} gradient; "
                "gradients must be dense (nn.Embedding: sparse=False)"
            )
        self.begin()
        unit.gradients.take(index, grad)
        if not unit.gradients.complete:
            return
        self._on_complete(unit)
        while self._fires and self._next < len(self._order) and self._order[self._next].gradients.complete:
            self._fire(self._order[self._next])

    def _fire(self, unit: Unit) -> None:
        """Send this unit's gradient, then add up the one before it, which has had a unit's time to arrive."""
        self._next += 1
        unit.reduce()
        if self._travelling:
            self._travelling[-1].gradients.sum()
        self._travelling.append(unit)
