"""When backward is done with parameters that get no gradient: once the call that read them has handed its on.

A trained unit is released when its last gradient lands. A frozen one has none, so each call of the module it
is anchored at is followed instead: open from the first gradient of its outputs until the gradients of all
its inputs are there. If that cannot be told (no input needs a gradient, or trained parameters inside the
module still wait for theirs), the unit stays until the end of the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zero.core.prefetcher import ParamPrefetcher
from zero.core.tensors import tensors_in
from zero.core.unit import Unit


class FrozenUnits:
    """The frozen units of one module, and the trained ones that are read inside it."""

    def __init__(self, frozen: Sequence[Unit], trained: Sequence[Unit], prefetcher: ParamPrefetcher) -> None:
        self._frozen = frozen
        self._trained = trained
        self._prefetcher = prefetcher
        self._open = 0  # calls of the module that the running backward is inside of
        self._backward = -1  # the backward that `_open` counts for

    def call(self, inputs: Any) -> FrozenCall | None:
        """Follow one call by its inputs, or None when its end cannot be seen from them."""
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        # A hook on a leaf would outlive the call, so a call with one is not followed.
        if not tensors or any(tensor.grad_fn is None for tensor in tensors):
            return None
        made = FrozenCall(self, len(tensors))
        for tensor in tensors:
            tensor.register_hook(made.passed_on)
        return made

    def opened(self, backward: int) -> None:
        """The backward with this number entered a call."""
        if self._backward != backward:
            self._backward, self._open = backward, 0
        self._open += 1

    def closed(self) -> None:
        """It has left one: release what no other open call reads."""
        self._open -= 1
        if self._open == 0 and all(unit.gradients.complete for unit in self._trained):
            for unit in self._frozen:
                self._prefetcher.done(unit)

    @property
    def backward(self) -> int:
        """The number of the backward that runs."""
        return self._prefetcher.backwards


class FrozenCall:
    """One call: open in a backward from `reached` until `passed_on` has come for every input."""

    def __init__(self, units: FrozenUnits, inputs: int) -> None:
        self._units = units
        self._inputs = inputs
        self._waiting = 0
        self._backward = -1

    def reached(self) -> None:
        """A gradient of an output is there."""
        if self._backward != self._units.backward:  # the first one; a graph may be run again
            self._backward, self._waiting = self._units.backward, self._inputs
            self._units.opened(self._backward)

    def passed_on(self, grad: torch.Tensor) -> None:
        """The gradient of an input is there."""
        if self._backward != self._units.backward:
            return  # it came round the module, not through it
        self._waiting -= 1
        if self._waiting == 0:
            self._units.closed()
