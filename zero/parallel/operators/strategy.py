"""How the tensors of operators are cut: pieces of each dim, and the mesh of ranks on which all of them can be said.

The words are MindSpore's: a strategy has the number of pieces of each dim, of each tensor of an operator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

Pieces = tuple[int, ...]
Cuts = list[tuple[int, ...]]  # the dims of a mesh that each dim of a tensor is cut along

# Dims of one letter are cut alike, of the tensors and last of the result; "*" is all dims before the letters.
_LINEAR, _MATMUL = ("*k", "nk", "n", "*n"), ("*mk", "*kn", "*mn")
_DIMS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((nn.Linear, F.linear), _LINEAR),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul), _MATMUL),
    nn.Embedding: ("*", "vd", "*d"),
    torch.addmm: ("mn", "mk", "kn", "mn"),
}


class Strategy(NamedTuple):
    """Pieces of each dim of the tensors that an operator of a `kind` is given, and its own parameters behind them.

    None stands for a tensor that is the same and whole on all ranks; `output` None for a result that stays as it comes.
    """

    name: str
    kind: Any
    inputs: tuple[Pieces | None, ...]
    output: Pieces | None = None

    def labels(self) -> list[list[Hashable]]:
        """What each dim of each tensor is called, and last of the result."""
        *ends, result = _DIMS.get(self.kind, "*")
        ends = [*ends, *"*" * len(self.inputs)][: len(self.inputs)]
        found = []
        for at, (end, own) in enumerate(zip([*ends, result], [*self.inputs, self.output], strict=True)):
            letters = end.removeprefix("*") if own is not None else ""
            rest = range(len(own or ()) - len(letters))
            # Those before the letters count from the right, as where shapes are broadcast; if that does not fit the
            # first tensor, from the left, as those of a mask of rows do.
            first = next(iter(self.inputs), None) or ()
            left = end == "*" and not _fit(own, first[-len(rest) :]) and _fit(own, first)
            before = [dim - (len(first) if left else len(rest)) for dim in rest] if "*" in end else []
            found.append([*before, *letters, *((at, dim) for dim in rest if not before)])
        return found


def _fit(own: Pieces | None, other: Pieces) -> bool:
    return all(count in (1, beside) for count, beside in zip(own or (), other, strict=False))


class Placing(NamedTuple):
    """Where the tensors of an operator are cut on a mesh; None for one that is whole, or a result that stays."""

    inputs: list[Cuts | None]
    output: Cuts | None


def strategy_of(name: str, target: nn.Module | Callable[..., Any], inputs: Any, output: Any) -> Strategy:
    """What a user has said of a function or a module, checked; raises ValueError for what are no pieces of dims."""
    for own in (*inputs, output) if isinstance(inputs, Sequence) else [0]:
        right = isinstance(own, Sequence) and all(type(count) is int and count > 0 for count in own)
        if own is not None and not right:
            raise ValueError(
                f"zero.shard: '{name}': got {inputs!r} -> {output!r}, wanted the pieces of each dim of each tensor, as "
                "in ((4, 1), (1, 1))"
            )
    kinds = type(target).__mro__ if isinstance(target, nn.Module) else (target,)
    kind = next((each for each in kinds if each in _DIMS), kinds[0])
    first = tuple(None if own is None else tuple(own) for own in inputs)
    return Strategy(name, kind, first, None if output is None else tuple(output))


def plan_mesh(ranks: int, strategies: Sequence[Strategy]) -> tuple[tuple[int, ...], list[Placing]]:
    """The mesh with the fewest dims on which all strategies can be said, and where each lies on it.

    Raises ValueError for a strategy that so many ranks do not allow.
    """
    primes = _primes(ranks)
    placings = [_assigned(each, primes) for each in strategies]
    used = {dim for each in placings for cuts in (*each.inputs, each.output) for dim in cuts or ()}
    # Neighbours that always come together are one dim.
    parted = [any((at in dim) != (at + 1 in dim) for dim in used) for at in range(len(primes) - 1)]
    dims = [*itertools.accumulate(parted, initial=0)]

    def merged(cuts: Cuts | None) -> Cuts | None:
        return None if cuts is None else [tuple(sorted({int(dims[prime]) for prime in dim})) for dim in cuts]

    shape = [1] * (dims[-1] + 1)
    for prime, at in zip(primes, dims, strict=False):
        shape[at] *= prime
    return tuple(shape), [Placing([merged(cuts) for cuts in each.inputs], merged(each.output)) for each in placings]


def _assigned(strategy: Strategy, primes: Sequence[int]) -> Placing:
    """The prime factors of the ranks that each dim takes."""
    *labels, last = strategy.labels()
    pieces: dict[Hashable, int] = {}
    for own, names in zip(strategy.inputs, labels, strict=True):
        for label, count in zip(names, own or (), strict=True):
            before = pieces.get(label, 1)
            if 1 < count != before > 1:
                raise ValueError(
                    f"zero.shard: '{strategy.name}': {strategy.inputs} has a dim that two tensors have in common in "
                    f"{before} and in {count} pieces; both are to be cut alike"
                )
            pieces[label] = max(count, before)
    found = _taken(strategy, pieces, primes, {})
    inputs = [
        None if own is None else [found[name] if count > 1 else () for count, name in zip(own, names, strict=True)]
        for own, names in zip(strategy.inputs, labels, strict=True)
    ]
    wanted = dict(zip(last, strategy.output or (), strict=True))
    kept = {label: found[label] for label, count in wanted.items() if pieces.get(label) == count}
    given = _taken(strategy, wanted, primes, kept)
    return Placing(inputs, None if strategy.output is None else [given[label] for label in last])


def _taken(
    strategy: Strategy, pieces: Mapping[Hashable, int], primes: Sequence[int], kept: Mapping[Hashable, tuple[int, ...]]
) -> dict[Hashable, tuple[int, ...]]:
    """The primes of each label, those to the left first: ranks that share a batch are neighbours."""
    found, free = dict(kept), [at for at in range(len(primes)) if not any(at in own for own in kept.values())]
    for label in (each for each in pieces if each not in found):
        left, own = pieces[label], list[int]()
        for at in free:
            if left % primes[at] == 0:
                left //= primes[at]
                own.append(at)
        if left > 1:
            raise ValueError(
                f"zero.shard: '{strategy.name}': {strategy.inputs} -> {strategy.output} makes "
                f"{math.prod(pieces.values())} pieces on {math.prod(primes)} ranks, which is no divisor of them"
            )
        free = [at for at in free if at not in own]
        found[label] = tuple(own)
    return found


def _primes(count: int) -> list[int]:
    factor = next((each for each in range(2, count + 1) if count % each == 0), 1)
    return [] if factor == 1 else [factor, *_primes(count // factor)]
