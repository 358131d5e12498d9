"""What a call of a module keeps under each policy, found out by running it once without recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero.core.owner import owner_of
from zero.core.tensors import tensors_in
from zero.core.torch_private import storage_id
from zero.recompute.ops import Kind, kind_of
from zero.recompute.policy import Cost
from zero.recompute.rest import Rest, made_by_graph
from zero.recompute.selective import keeps


class Tally(TorchDispatchMode):
    """Notes the bytes of what products, each by itself, and attention give."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[int] = []
        self.attention = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled, as under the modes that recompute."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note and go on."""
        out = func(*args, **(kwargs or {}))
        kind = kind_of(func)
        if kind is not Kind.CHEAP:
            nbytes = sum(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
            if kind is Kind.PRODUCT:
                self.products.append(nbytes)
            else:
                self.attention += nbytes
        return out


def measured(
    module: nn.Module, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], rest: Rest, every: int
) -> tuple[Any, Cost]:
    """`fn(*args, **kwargs)` of `module` as it is, and the bytes that it would keep on the device under each policy.

    Parameters, buffers and inputs that are kept by somebody else in any case do not count. `every`: as in `Selective`.
    """
    inputs = list(tensors_in((tuple(args), dict(kwargs))))
    others = [tensor for tensor in inputs if not made_by_graph(tensor)]
    foreign = _memories(module, others)
    saved: dict[int | None, int] = {}
    tally, needed = Tally(), 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal needed
        # Packed is what a recomputation has to bring about, so products up to here are needed for it.
        needed = len(tally.products)
        memory = storage_id(tensor)
        saved[memory] = tensor.untyped_storage().nbytes() if memory is not None else tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, _same), tally:
        out = fn(*args, **kwargs)
    foreign |= _memories(module, others)  # of units that were gathered inside, too
    none = sum(nbytes for memory, nbytes in saved.items() if memory not in foreign)
    kept = sum(nbytes for place, nbytes in enumerate(tally.products) if keeps(place, every, needed))
    full = sum(map(rest.nbytes_of, inputs))
    return out, Cost(none, full + kept + tally.attention, full)


def _memories(module: nn.Module, others: Iterable[torch.Tensor]) -> set[int | None]:
    owners = [(param, owner_of(param)) for param in module.parameters()]
    found = {storage_id(param) if owner is None else storage_id(owner.unit.full) for param, owner in owners}
    return found | {storage_id(tensor) for tensor in (*module.buffers(), *others)}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
