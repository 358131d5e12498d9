"""A backward in two parts: the gradients of the inputs now, those of the parameters later (Qi et al., 2023).

Nodes of the graph from which inputs are reached are run in the first part. Where such a node also leads to parameters,
what arrives at it is kept, and the second part begins there, with no more than that, whatever else of the second part
arrives. What leads to parameters by no such node begins at the outputs. So each path to a parameter counts once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

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
    first = _first(inputs, users)
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


def _first(inputs: Iterable[torch.Tensor], users: Users) -> set[Node]:
    """The nodes that lead to inputs."""
    left = [node for node in (get_gradient_edge(each).node for each in inputs) if node in users]
    found = {*left}
    while left:
        fresh = [node for node in users[left.pop()] if node not in found]
        found.update(fresh)
        left += fresh
    return found


def _groups(params: Iterable[nn.Parameter], users: Users, first: set[Node], ends: Sequence[Node]) -> list[Group]:
    by_begin: dict[Node | int, Group] = {}
    for param in params:
        group = Group([param])
        for node in _above(get_gradient_edge(param).node, users, first):
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


def _above(node: Node, users: Users, first: set[Node]) -> Iterator[Node]:
    """The node and those that lead to it, up to and with the first ones of the first part."""
    left, seen = [node] if node in users else [], {node}
    while left:
        yield (node := left.pop())
        if node not in first:
            fresh = {each: None for each in users[node] if each not in seen}
            seen.update(fresh)
            left += fresh
