"""One stage of a pipeline on this rank: its part of the model, and the micro-batches that are alive in it.

A backward may be in two parts: the gradients of the inputs now, those of the parameters later (Qi et al., 2023). Nodes
of the graph from which inputs are reached are run in the first part. Where such a node also leads to parameters, what
arrives at it is kept, and the second part begins there, with no more than that, whatever else of the second part
arrives. What leads to parameters by no such node begins at the outputs. So each path to a parameter counts once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from zero.core.hooks import tensors_in
from zero.core.unit import Unit


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
    rest: Rest | None = None


class Alias(torch.autograd.Function):
    """Another tensor with the same memory and gradient, which is no view and no leaf."""

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
        """The forward: from the output of the stage before to that of this one."""
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
        """The gradients of the parameters; `Reducer.sweep` then runs hooks that autograd did not."""
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


Users = Mapping[Node, Sequence[Node]]  # of a node, those that gradients come from


@dataclass
class Group:
    """Parameters that have a begin in common, and all of these: nodes of the first part, and numbers of outputs."""

    params: list[nn.Parameter]
    nodes: dict[Node, None] = field(default_factory=dict)
    outputs: dict[int, None] = field(default_factory=dict)


@dataclass
class Rest:
    """What the first part leaves: groups of parameters, what arrived at nodes, and outputs with their gradients."""

    groups: list[Group]
    arrived: dict[Node, tuple[torch.Tensor | None, ...]]
    outputs: dict[int, tuple[torch.Tensor, torch.Tensor | None]]


def backward_of_inputs(
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    inputs: Sequence[torch.Tensor],
    params: Iterable[nn.Parameter],
) -> tuple[Sequence[torch.Tensor | None], Rest]:
    """The gradients of the inputs, and what `backward_of_params` wants; keeps the graph. outputs: with gradients."""
    if not outputs:
        return [None] * len(inputs), Rest([], {}, {})
    tensors, grads = zip(*outputs, strict=True)
    ends = [get_gradient_edge(each).node for each in tensors]
    users = _users(ends)
    first = {*_above((get_gradient_edge(each).node for each in inputs), users)}
    groups = _groups(params, users, first, ends)
    arrived: dict[Node, tuple[torch.Tensor | None, ...]] = {}
    with contextlib.ExitStack() as hooks:
        for node in {node: None for group in groups for node in group.nodes}:
            hooks.callback(node.register_prehook(partial(arrived.__setitem__, node)).remove)
        found = torch.autograd.grad(tensors, inputs, grads, retain_graph=True, allow_unused=True)
    wanted = {number for group in groups for number in group.outputs}
    return found, Rest(groups, arrived, {number: outputs[number] for number in wanted})


def backward_of_params(rest: Rest) -> None:
    """Add to `grad` of the parameters; hooks that run once gradients are added do not see it."""
    from torch.utils.checkpoint import GraphExecGroup  # pipelines want a torch that has it; not all of zero does

    # Those of several nodes run others between them again: before these let go of what they need, and without sharing
    # what is recomputed, which is so once for all groups where each has a node of its own.
    groups = sorted(rest.groups, key=lambda group: len(group.nodes), reverse=True)
    with contextlib.nullcontext() if groups and len(groups[0].nodes) > 1 else GraphExecGroup():
        for group in groups:
            _backward(group, rest)


def _backward(group: Group, rest: Rest) -> None:
    begins: list[Any] = []
    grads: list[torch.Tensor | None] = []
    with contextlib.ExitStack() as hooks:
        for node in group.nodes:
            arrived = rest.arrived.get(node, ())
            hooks.callback(node.register_prehook(partial(_instead, arrived)).remove)
            for place, grad in enumerate(arrived):
                if grad is not None:
                    begins.append(GradientEdge(node, place))
                    grads.append(grad)
        for output, grad in (rest.outputs[number] for number in group.outputs):
            begins.append(output)
            grads.append(grad)
        if not begins:
            return
        edges = [get_gradient_edge(param) for param in group.params]
        again = len(group.nodes) > 1
        found = torch.autograd.grad(begins, edges, grads, retain_graph=again, allow_unused=True)
    for param, grad in zip(group.params, found, strict=True):
        if grad is not None:
            param.grad = grad if param.grad is None else param.grad + grad


def _instead(arrived: Any, _: Any) -> Any:
    return arrived


def _users(ends: Iterable[Node]) -> Users:
    users: dict[Node, list[Node]] = {node: [] for node in ends}
    left = [*users]
    while left:
        node = left.pop()
        for below, _ in node.next_functions:
            if below is not None:
                if below not in users:
                    users[below] = []
                    left.append(below)
                users[below].append(node)
    return users


def _groups(params: Iterable[nn.Parameter], users: Users, first: set[Node], ends: Sequence[Node]) -> list[Group]:
    by_begin: dict[Node | int, Group] = {}
    for param in params:
        group = Group([param])
        for node in _above([get_gradient_edge(param).node], users, first):
            if node in first:
                group.nodes[node] = None
            else:
                group.outputs.update((number, None) for number, end in enumerate(ends) if end is node)
        begins = [*group.nodes, *group.outputs]
        for other in {id(by_begin[each]): by_begin[each] for each in begins if each in by_begin}.values():
            group.params += other.params
            group.nodes |= other.nodes
            group.outputs |= other.outputs
        by_begin.update(dict.fromkeys([*group.nodes, *group.outputs], group))
    return list({id(group): group for group in by_begin.values()}.values())


def _above(nodes: Iterable[Node], users: Users, ends: Collection[Node] = ()) -> Iterator[Node]:
    """These nodes and those that gradients reach them from, up to and with the first ones of `ends`."""
    left = [node for node in nodes if node in users]
    seen = {*left}
    while left:
        yield (node := left.pop())
        if node not in ends:
            fresh = {each: None for each in users[node] if each not in seen}
            seen.update(fresh)
            left += fresh
