"""One stage of a pipeline on this rank: its part of the model, and the micro-batches that are alive in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from zero.core.hooks import tensors_in
from zero.core.unit import Unit
from zero.parallel.pipeline.two_parts import backward_of_inputs, backward_of_params


class Batch(NamedTuple):
    """A micro-batch: its number in the schedule, what the model is called with, what its output is compared with.

    share: of the batch that it was cut from; key: of its shapes: micro-batches with equal keys have activations of
    equal forms; digest: of some of its values.
    """

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    share: float = 1.0
    key: str = ""
    digest: int = 0


class Alive(NamedTuple):
    """A micro-batch between its forward and its backward; keeps its graph alive.

    inputs: tensors that came from the stage before, leaves of the graph; outputs: those that go to the next stage, or
    the loss; rest: after the backward of the inputs, what that of the weights wants.
    """

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor | None] = ()
    rest: Any = None


class Alias(torch.autograd.Function):
    """The same memory and gradient by another tensor, no view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The alias."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Its gradient."""
        return grad


class Stage:
    """Runs micro-batches forward and backward.

    units: that it reads; own: those of them that no other stage reads; alive: see `Alive`, by micro-batch.
    """

    def __init__(self, index: int, run: Callable[[int, Any, Batch], Any], units: Sequence[Unit]) -> None:
        self.index = index
        self._run = run
        self.units = self.own = units
        self.params = [param for unit in units for param in unit.params if param.requires_grad]
        self.alive: dict[int, Alive] = {}

    def run(self, values: Any, batch: Batch) -> Any:
        """From what comes from the stage before to what goes to the next one, or the model's output."""
        return self._run(self.index, values, batch)

    def keep(self, number: int, inputs: Sequence[torch.Tensor], output: Any) -> None:
        """The forward of a micro-batch has ended with this output; its tensors are kept for the backward."""
        self.alive[number] = Alive([each for each in inputs if each.requires_grad], list(tensors_in(output)))

    def backward(self, number: int, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The whole backward: gradients of the parameters land in the units; returns those of the inputs."""
        alive = self.alive.pop(number)
        return self._whole(alive._replace(grads=grads))

    def backward_input(self, number: int, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The gradients of the inputs alone; `backward_weight` does the rest."""
        alive = self.alive[number]._replace(grads=grads)
        if not alive.inputs or not self.params:
            # Nothing to send: all of it is of the weights. Or no weights: all of it is of the inputs.
            self.alive[number] = alive
            return [] if not alive.inputs else self._whole(alive)
        found, rest = backward_of_inputs(_with_grads(alive), alive.inputs, self.params)
        self.alive[number] = alive._replace(outputs=(), rest=rest)
        return [_laid_out(grad, each) for grad, each in zip(found, alive.inputs, strict=True)]

    def backward_weight(self, number: int) -> None:
        """What `backward_input` has left; `Reducer.sweep` then runs hooks that autograd did not."""
        alive = self.alive.pop(number)
        if alive.rest is not None:
            backward_of_params(alive.rest)
        elif not alive.inputs:
            self._whole(alive)

    def _whole(self, alive: Alive) -> list[torch.Tensor]:
        found = _with_grads(alive)
        if found:
            outputs, grads = zip(*found, strict=True)
            torch.autograd.backward(outputs, grads)
        sent = [_laid_out(each.grad, each) for each in alive.inputs]
        for each in alive.inputs:
            each.grad = None
        return sent


def _with_grads(alive: Alive) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The outputs that a backward begins from; no gradients are given of a loss."""
    wanted = [each for each in alive.outputs if each.requires_grad]
    return list(zip(wanted, alive.grads or [None] * len(wanted), strict=True))


def _laid_out(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A gradient with the strides of its tensor, which the rank that receives it takes it to have; zeros for None."""
    if grad is None:
        return torch.zeros_like(like)
    return grad if grad.stride() == like.stride() else torch.empty_like(like).copy_(grad)
