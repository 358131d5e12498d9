"""Selective recomputation: what matrix products and attention gave is kept, the cheap rest is computed again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zero.recompute.ops import Kind, kind_of

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


class Selective:
    """What calls of one module keep.

    every:  each so many products, counted through a call, is kept; 1 is all;
    needed: how many products a recomputation comes to before it has all that backward wants, None until one has run.
            What those behind give need not be kept: such is the last product of a block, which is added to x.
    """

    def __init__(self, name: str, every: int = 1) -> None:
        self.name = name
        self.every = every
        self.needed: int | None = None

    def contexts(self) -> Contexts:
        """Around one forward, and around its recomputations."""
        counts = {False: 0, True: 0}  # torch may ask again in a recomputation
        needed = self.needed
        kept: list[tuple[torch.Tensor, int]] = []

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kind = kind_of(op)
            if kind is Kind.CHEAP:
                return CheckpointPolicy.PREFER_RECOMPUTE
            if kind is Kind.PRODUCT:
                place = counts[context.is_recompute]
                counts[context.is_recompute] += 1
                if not keeps(place, self.every, needed):
                    return CheckpointPolicy.PREFER_RECOMPUTE
            outputs = tree_leaves(getattr(context, "op_output", None))
            kept.extend((output, output._version) for output in outputs if isinstance(output, torch.Tensor))
            return CheckpointPolicy.MUST_SAVE

        forward, again = create_selective_checkpoint_contexts(policy)
        return _Forward(forward, kept, self.name), _Again(again, self._learn if needed is None else None)

    def _learn(self, reached: int) -> None:
        self.needed = reached


def keeps(place: int, every: int, needed: int | None) -> bool:
    """Whether the product with this number, from 0, is kept; the first of each `every` are not."""
    return place % every == every - 1 and (needed is None or place < needed)


class _Forward:
    """Keeps results while a forward runs, and refuses such as were changed in place after they were kept."""

    def __init__(self, mode: Any, kept: list[tuple[torch.Tensor, int]], name: str) -> None:
        self._mode = mode
        self._kept = kept
        self._name = name

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._mode.__exit__(kind, error, trace)
        changed = any(tensor._version != version for tensor, version in self._kept)
        self._kept.clear()  # they have come to hold the graph, which holds us
        if changed and kind is None:
            raise RuntimeError(
                f"recomputed module '{self._name}' changes in place what a matrix product or attention gave, which "
                "policy 'selective' keeps; use policy 'full', or do without the change (inplace=False)"
            )


class _Again:
    """Gives what was kept to the first recomputation. It takes it away, so that later ones compute everything.

    Several come where a backward ran with `retain_graph`, or two backward calls go through one module.
    """

    def __init__(self, mode: Any, learn: Callable[[int], None] | None) -> None:
        self._mode = mode
        self._learn = learn
        self._counter: ProductCounter | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            self._open.enter_context(mode)
            if self._learn is not None:
                self._counter = self._open.enter_context(ProductCounter())

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._open.close()
        counter, self._counter = self._counter, None
        if counter is not None:
            self._learn(counter.count)


class ProductCounter(TorchDispatchMode):
    """Counts products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled, as under torch's own modes; else a recomputation would not match."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and go on."""
        out = func(*args, **(kwargs or {}))
        if kind_of(func) is Kind.PRODUCT:
            self.count += 1
            self.saw(Kind.PRODUCT, out)
        elif kind_of(func) is Kind.ATTENTION:
            self.saw(Kind.ATTENTION, out)
        return out

    def saw(self, kind: Kind, out: Any) -> None:
        """A product or an attention has given `out`; for subclasses."""
