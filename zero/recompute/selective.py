"""Selective recomputation: results of matrix products and attention are kept, the cheap rest is recomputed.

Like torch's own selective contexts, two dispatch modes for `torch.utils.checkpoint`; but these do next to nothing for a
cheap operation, of which a block has many, and know how many products the backward needs.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections import deque
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zero.recompute.holder import HOLDER


class Kind(enum.Enum):
    """How a policy classifies an operation."""

    PRODUCT = "product"
    ATTENTION = "attention"
    CHEAP = "cheap"


_PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear"),
    *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"),
    *("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
}
_ATTENTION = ("attention", "flash_attn")  # in the names of torch's fused operators and of packages'


@functools.cache
def kind_of(op: Any) -> Kind:
    """The kind of an operator; one that writes into its arguments is repeated: its writes could not be kept."""
    if getattr(getattr(op, "_schema", None), "is_mutable", False):
        return Kind.CHEAP
    name = str(op).lower()  # namespace.name.overload
    parts = name.split(".")
    if (parts[1] if len(parts) > 1 else name) in _PRODUCTS:
        return Kind.PRODUCT
    if any(word in name for word in _ATTENTION) and "backward" not in name:
        return Kind.ATTENTION
    return Kind.CHEAP


Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


class KeptResult(NamedTuple):
    """The kept result of an operation.

    versions: of the tensors in `out`;
    drawn:    the generator that it used, and its state afterwards, for attention with dropout; else None.
    """

    op: Any
    out: Any
    versions: list[int]
    drawn: tuple[torch.Generator, torch.Tensor] | None

    @property
    def changed(self) -> bool:
        """Whether a tensor was changed in place since, so that the operation must be repeated."""
        return self.versions != _versions(self.out)


class Selective:
    """The rule for what calls of one module keep: of so many products (`every`) one, 1 for all.

    needed: how many products a recomputation runs before it has all that the backward needs, None until one has run.
    Later products need not be kept, such as the last product of a block, which is added to x.
    """

    def __init__(self, name: str, every: int = 1) -> None:
        self.name = name
        self.every = every
        self.needed: int | None = None

    def contexts(self) -> Contexts:
        """The contexts of one forward, and of its recomputations."""
        needed = self.needed
        kept: deque[KeptResult] = deque()
        return _Caching(kept, self, needed), _Cached(kept, self, needed)


def keeps(place: int, every: int, needed: int | None) -> bool:
    """Whether the product with this number, from 0, is kept; the first of each `every` are not."""
    return place % every == every - 1 and (needed is None or place < needed)


class _SelectiveMode(TorchDispatchMode):
    """Decides for each operation whether its result is kept; a forward and its recomputations decide alike."""

    def __init__(self, kept: deque[KeptResult], module: Selective, needed: int | None) -> None:
        super().__init__()
        self._kept = kept
        self._module = module
        self._needed = needed
        self._products = 0
        self._depth = 0  # how many recomputed calls this one is inside of, and itself

    def __enter__(self) -> Any:
        self._depth = HOLDER.scope.inside
        return super().__enter__()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled, as under torch's own modes; else a recomputation would not match."""
        return True

    def _chosen(self, op: Any) -> bool:
        kind = kind_of(op)
        # A call inside, such as a slice of an MLP, is recomputed by itself: what is kept of it would be no use.
        if kind is Kind.CHEAP or HOLDER.scope.inside > self._depth:
            return False
        if kind is Kind.ATTENTION:
            return True
        self._products += 1
        return keeps(self._products - 1, self._module.every, self._needed)


class _Caching(_SelectiveMode):
    """Keeps results while a forward runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and keep the chosen results."""
        if not self._chosen(func):
            return func(*args, **(kwargs or {}))
        generator = _generator((args, kwargs)) if kind_of(func) is Kind.ATTENTION else None
        before = generator.get_state() if generator is not None else None
        out = func(*args, **(kwargs or {}))
        drawn = None
        if generator is not None and not torch.equal(after := generator.get_state(), before):
            drawn = generator, after
        self._kept.append(KeptResult(func, out, _versions(out), drawn))
        return out

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        for place, each in enumerate(self._kept):
            # Results now hold the graph, which holds this object; one that the module changed itself is useless.
            out = None if each.changed else tree_map_only(torch.Tensor, torch.Tensor.detach, each.out)
            self._kept[place] = each._replace(out=out)


class _Cached(_SelectiveMode):
    """Gives kept results to the first recomputation, and drops them, so that later ones compute everything.

    There are several if a backward ran with `retain_graph`, or two backward calls go through one module.
    """

    _first: bool | None = None  # whether the current or last recomputation is the first

    def __enter__(self) -> Any:
        self._first = self._first is None
        return super().__enter__() if self._first else self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._first:
            super().__exit__(kind, error, trace)
            self._kept.clear()
            if self._needed is None:
                self._module.needed = self._products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The kept result of this operation, or a computed one."""
        if not self._chosen(func):
            return func(*args, **(kwargs or {}))
        kept = self._kept.popleft() if self._kept else None
        if kept is None or kept.op is not func:
            raise RuntimeError(
                f"recomputed module '{self._module.name}' came to {func} where its forward had "
                f"{'no more to keep' if kept is None else kept.op}; it must run the same operations both times, "
                "whatever it depends on"
            )
        if kept.changed:
            return func(*args, **(kwargs or {}))
        if kept.drawn is not None:  # so that the next draw is that of the forward
            generator, state = kept.drawn
            generator.set_state(state)
        return kept.out


def _versions(out: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def _generator(arguments: Any) -> torch.Generator | None:
    """The generator that an operation on these tensors uses."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor):
            cuda = leaf.device.type == "cuda"
            return torch.cuda.default_generators[leaf.device.index] if cuda else torch.default_generator
    return None
