"""How the tensors of operators are cut: pieces of each dim, and the mesh of ranks on which all of them can be said.

The words are MindSpore's: a strategy is the number of pieces of each dim, of each tensor of an operator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

Pieces = tuple[int, ...]
Label = Hashable

# The dims of tensors, then those of the result: dims of one letter are cut alike; "*" is all dims before the letters.
_CONV = ("nc", "oc", "o", "no")
_LINEAR = ("*k", "nk", "n", "*n")
_MATMUL = ("*mk", "*kn", "*mn")
_DIMS: dict[Any, tuple[str, ...]] = {
    nn.Linear: _LINEAR,
    F.linear: _LINEAR,
    nn.Embedding: ("*", "vd", "*d"),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d, F.conv1d, F.conv2d, F.conv3d), _CONV),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul), _MATMUL),
    torch.addmm: ("mn", "mk", "kn", "mn"),
}


class Strategy(NamedTuple):
    """Pieces of each dim of the tensors that an operator is given, and its own parameters behind them.

    None stands for a tensor that is the same and whole on all ranks; `output` None for a result that stays as it comes.
    """

    name: str
    kind: Any
    inputs: tuple[Pieces | None, ...]
    output: Pieces | None = None

    def labels(self) -> list[list[Label]]:
        """What each dim of each tensor is called, and last of the result: dims that are cut alike have one name."""
        *ends, result = _DIMS.get(self.kind, ("*",))
        pieces = [*self.inputs, self.output]
        last = [result] if ends else ["*"]
        ends = [*ends, *"*" * len(pieces)][: len(self.inputs)] + last
        return [
            [] if own is None else _named(end, len(own), at)
            for at, (end, own) in enumerate(zip(ends, pieces, strict=True))
        ]


def _named(end: str, ndim: int, tensor: int) -> list[Label]:
    letters = end.removeprefix("*")
    rest = ndim - len(letters)
    if end.startswith("*"):  # counted from the right, as where shapes are broadcast
        return [*range(-rest, 0), *letters]
    return [*letters[:ndim], *((tensor, dim) for dim in range(rest))]


class Placing(NamedTuple):
    """The dims of the mesh along which each dim of each tensor of an operator is cut; None for a whole tensor."""

    inputs: list[list[tuple[int, ...]] | None]
    output: list[tuple[int, ...]] | None


class MeshPlan(NamedTuple):
    """The mesh, and where each strategy lies on it."""

    shape: tuple[int, ...]
    groups: list[int]  # the dim of the mesh that each prime factor of the ranks belongs to
    primes: list[int]

    def place(self, strategy: Strategy) -> Placing:
        """Raises ValueError for a strategy that this mesh has no dims for."""
        wanted = _assigned(strategy, self.primes)

        def merged(dims: Sequence[tuple[int, ...]] | None) -> list[tuple[int, ...]] | None:
            if dims is None:
                return None
            found = [tuple(sorted({self.groups[prime] for prime in each})) for each in dims]
            for own, each in zip(dims, found, strict=True):
                if math.prod(self.primes[at] for at in own) != math.prod(self.shape[at] for at in each):
                    raise ValueError(
                        f"zero.shard: {strategy.name} was not known when the engine was made, and the mesh "
                        f"{self.shape} of those that were has no dims for it; make it in the model's __init__"
                    )
            return found

        return Placing([merged(each) for each in wanted.inputs], merged(wanted.output))


def plan_mesh(ranks: int, strategies: Iterable[Strategy]) -> MeshPlan:
    """The mesh with the fewest dims on which all strategies can be said. ValueError for one that ranks do not allow."""
    primes = _primes(ranks)
    placings = [_assigned(each, primes) for each in strategies]
    tensors = [dims for each in placings for dims in (*each.inputs, each.output) if dims is not None]
    used = {frozenset(dim) for dims in tensors for dim in dims}
    # Neighbours that always come together are one dim.
    parted = [any((at in each) != (at + 1 in each) for each in used) for at in range(len(primes) - 1)]
    groups = [*itertools.accumulate(map(int, parted), initial=0)] if primes else []
    shape = [math.prod(prime for prime, own in zip(primes, groups, strict=True) if own == at) for at in {*groups}]
    return MeshPlan(tuple(shape) or (1,), groups, primes)


def _assigned(strategy: Strategy, primes: Sequence[int]) -> Placing:
    """The prime factors of the ranks that each dim takes, of the left ones first, as ranks of a batch are neighbours."""
    *labels, last = strategy.labels()
    pieces: dict[Label, int] = {}
    for at, (own, names) in enumerate(zip(strategy.inputs, labels, strict=True)):
        for label, count in zip(names, own or (), strict=True):
            if 1 not in (count, pieces.get(label, 1)) and count != pieces[label]:
                raise ValueError(
                    f"zero.shard: {strategy.name}: tensor {at} has a dim in {count} pieces that another has in "
                    f"{pieces[label]}; both have to be cut alike: {strategy.inputs}"
                )
            pieces[label] = max(count, pieces.get(label, 1))
    found = _taken(strategy, pieces, primes, {})
    inputs = [
        None if own is None else [found[name] if count > 1 else () for count, name in zip(own, names, strict=True)]
        for own, names in zip(strategy.inputs, labels, strict=True)
    ]
    if strategy.output is None:
        return Placing(inputs, None)
    wanted = dict(zip(last, strategy.output, strict=True))
    kept = {label: found[label] for label, count in wanted.items() if count > 1 and pieces.get(label) == count}
    given = _taken(strategy, wanted, primes, kept)
    return Placing(inputs, [given[label] for label in last])


def _taken(
    strategy: Strategy, pieces: Mapping[Label, int], primes: Sequence[int], kept: Mapping[Label, tuple[int, ...]]
) -> dict[Label, tuple[int, ...]]:
    found, free = dict(kept), [at for at in range(len(primes)) if not any(at in own for own in kept.values())]
    for label, count in pieces.items():
        if label in found:
            continue
        left, own = count, list[int]()
        for at in list(free):
            if left % primes[at] == 0:
                left //= primes[at]
                own.append(at)
                free.remove(at)
        if left > 1:
            raise ValueError(
                f"zero.shard: {strategy.name}: the strategy {strategy.inputs}"
                f"{'' if strategy.output is None else f' -> {strategy.output}'} cuts in {math.prod(pieces.values())} "
                f"pieces, which do not go into {math.prod(primes)} ranks; the product of the pieces has to divide them"
            )
        found[label] = tuple(own)
    return found


def _primes(count: int) -> list[int]:
    found, factor = [], 2
    while count > 1:
        while count % factor == 0:
            found.append(factor)
            count //= factor
        factor += 1
    return found


def strategy_of(name: str, kind: Any, inputs: Any, output: Any) -> Strategy:
    """What a user has said, checked; raises ValueError for what are no pieces of dims."""
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise ValueError(
            f"zero.shard: {name}: got {inputs!r}, wanted the pieces of each dim of each tensor, ((4, 1), (1, 1))"
        )
    told = [*inputs, output]
    for own in told:
        right = own is None or (isinstance(own, Sequence) and all(type(count) is int and count > 0 for count in own))
        if not right:
            raise ValueError(f"zero.shard: {name}: got {own!r}, wanted a number of pieces, from 1, for each dim")
    *first, last = [None if own is None else tuple(own) for own in told]
    return Strategy(name, kind, tuple(first), last)


def kind_of(target: nn.Module | Callable[..., Any]) -> Any:
    """By which the dims of an operator are known: the function, or the class that it is or descends from."""
    if isinstance(target, nn.Module):
        return next((each for each in type(target).__mro__ if each in _DIMS), type(target))
    return target
