"""When backward is done with parameters that get no gradient: once the call that read them has handed its on.

A trained unit is released when its last gradient lands. A frozen one has none, so each call of the module it
is anchored at is followed instead: open from the first gradient of its outputs until the gradients of all
its inputs are there. If that cannot be told (no input needs a gradient, or trained parameters inside the
module still wait for theirs), the unit stays until the end of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        self._backward = -1  # the number of the backward that `_open` counts for

    def follow(self, inputs: Any) -> Callable[[], None] | None:
        """Follow one call by its inputs; returns what to call when the gradient of an output is there.

        None where the end of the call cannot be seen from them. In a backward it is open from then on until the
        gradient of every input is there.
        """
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        # A hook on a leaf would outlive the call, so a call with one is not followed.
        if not tensors or any(tensor.grad_fn is None for tensor in tensors):
            return None
        count, backward, waiting = len(tensors), -1, 0  # no hook may hold the tensors themselves

        def reached() -> None:
            nonlocal backward, waiting
            if backward != self._prefetcher.backwards:  # the first output; a graph may be run again
                backward, waiting = self._prefetcher.backwards, count
                self._opened(backward)

        def passed_on(grad: torch.Tensor) -> None:
            nonlocal waiting
            if backward == self._prefetcher.backwards:  # else it came round the module, not through it
                waiting -= 1
                if waiting == 0:
                    self._closed()

        for tensor in tensors:
            tensor.register_hook(passed_on)
        return reached

    def _opened(self, backward: int) -> None:
        """The backward with this number entered a call."""
        if self._backward != backward:
            self._backward, self._open = backward, 0
        self._open += 1

    def _closed(self) -> None:
        """It has left one: release what no other open call reads."""
        self._open -= 1
        if self._open == 0 and all(unit.gradients.complete for unit in self._trained):
            for unit in self._frozen:
                self._prefetcher.done(unit)
