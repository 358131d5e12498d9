"""What recomputed modules keep beside their inputs: results of matrix products and attention, or of all but some.

Torch's selective checkpoint keeps and gives back; here is the rule by which it does.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Collection
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zero.core.torch_private import operators_run, repeat_changed
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
    if _name(op) in _PRODUCTS:
        return Kind.PRODUCT
    if any(word in name for word in _ATTENTION) and "backward" not in name:
        return Kind.ATTENTION
    return Kind.CHEAP


def is_operator(name: str) -> bool:
    """Whether torch has it: "gelu", "aten.gelu", "aten.gelu.default"."""
    found: Any = torch.ops if "." in name else torch.ops.aten
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def _name(op: Any) -> str:
    parts = str(op).lower().split(".")
    return parts[1] if len(parts) > 1 else parts[0]


Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


class Selective:
    """The rule for what calls of one module keep.

    every: of so many products one, 1 for all; None for none; ops: the names of operators ("gelu", "aten.mm") whose
    results are not kept, those of all others being; needed: how many products a recomputation runs before it has all
    that the backward needs, None until one has run. Later products need not be kept, such as the last of a block, which
    is added to x.
    """

    def __init__(self, every: int | None = 1, ops: Collection[str] = ()) -> None:
        self.every, self.ops = every, ops
        self.needed: int | None = None

    def contexts(self) -> Contexts:
        """The contexts of one forward, and of its recomputations."""
        depth, needed, products = HOLDER.scope.inside + 1, self.needed, 0

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal products
            kind, scope, kept = kind_of(op), HOLDER.scope, False
            # A call inside, such as a slice of an MLP, is recomputed by itself: what is kept of it would be no use.
            if scope.inside == depth:
                products += kind is Kind.PRODUCT
                if scope.kept or self.ops:
                    kept = _lasts(op) and (scope.kept or not self._names(op))
                elif self.every is not None:
                    product = kind is Kind.PRODUCT and keeps(products - 1, self.every, needed)
                    kept = product or kind is Kind.ATTENTION
            save = kept and not _draws(op, args, kwargs)
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        first, later = create_selective_checkpoint_contexts(policy)
        return first, _Given(later, self)

    def _names(self, op: Any) -> bool:
        name = str(op)
        return not {_name(op), name.rpartition(".")[0], name}.isdisjoint(self.ops)


def keeps(place: int, every: int, needed: int | None) -> bool:
    """Whether the product with this number, from 0, is kept; the first of each `every` are not."""
    return place % every == every - 1 and (needed is None or place < needed)


@functools.cache
def _lasts(op: Any) -> bool:
    """Whether a result has memory of its own, which no later operation of the module could share."""
    schema = getattr(op, "_schema", None)
    return schema is not None and not schema.is_mutable and not any(each.alias_info for each in schema.returns)


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether it draws at random. Then it is repeated, so that later draws are those of the forward."""
    schema = getattr(op, "_schema", None)  # operators of higher order have none, and draw nothing
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs if schema else {}
    drops = [value for name, value in given.items() if "dropout" in name]
    return any(drops) if drops else torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


class _Given:
    """Gives what was kept, and nothing has written into, to the first recomputation; later ones compute all.

    There are several if a backward ran with `retain_graph`, or two backward calls go through one module.
    """

    def __init__(self, kept: Any, module: Selective) -> None:
        self._kept, self._module = kept, module
        self._runs = contextlib.nullcontext()

    def __enter__(self) -> None:
        kept, self._kept = self._kept, None
        self._runs = kept if kept is not None and repeat_changed(kept) else contextlib.nullcontext()
        self._runs.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._runs.__exit__(*error)
        if self._module.needed is None:
            ran = operators_run(self._runs).items()
            self._module.needed = sum(count for op, count in ran if kind_of(op) is Kind.PRODUCT) or None
        self._runs = contextlib.nullcontext()
