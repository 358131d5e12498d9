"""Policy "auto": measure in the first step, then recompute as little as the budget allows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero.core.agree import agree
from zero.core.comm import Axis
from zero.core.hooks import tensors_in
from zero.core.owner import owner_of
from zero.core.prefetcher import in_backward
from zero.core.torch_private import storage_id
from zero.log import rank_zero
from zero.plan.memory import MIB
from zero.recompute.holder import HOLDER
from zero.recompute.policy import Choice, Cost, Policy, choose
from zero.recompute.saved_inputs import InputStore, made_by_graph
from zero.recompute.selective import Kind, keeps, kind_of


class ProductBytes(TorchDispatchMode):
    """Records the bytes of the results of attention and of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[int] = []
        self.attention = 0
        self._depth = HOLDER.scope.inside

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled, as the recomputing modes do."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the result, unless a call inside is recomputed by itself."""
        out = func(*args, **(kwargs or {}))
        kind = kind_of(func)
        if kind is not Kind.CHEAP and HOLDER.scope.inside == self._depth:
            nbytes = sum(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
            if kind is Kind.PRODUCT:
                self.products.append(nbytes)
            else:
                self.attention += nbytes
        return out


def measured(
    module: nn.Module,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    store: InputStore,
    every: int,
) -> tuple[Any, Cost]:
    """`fn(*args, **kwargs)` of `module`, unchanged, and the bytes that it would keep on the device under each policy.

    Parameters, buffers and inputs that are kept elsewhere in any case do not count. `every`: as in `Selective`.
    """
    inputs = list(tensors_in((tuple(args), dict(kwargs))))
    others = [tensor for tensor in inputs if not made_by_graph(tensor)]
    foreign = _memories(module, others)
    saved: dict[int | None, int] = {}
    tally, needed = ProductBytes(), 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal needed
        # Autograd saves this tensor, so a recomputation needs all products up to here.
        needed = len(tally.products)
        memory = storage_id(tensor)
        saved[memory] = tensor.untyped_storage().nbytes() if memory is not None else tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), tally:
        out = fn(*args, **kwargs)
    foreign |= _memories(module, others)  # also of units that were gathered inside
    none = sum(nbytes for memory, nbytes in saved.items() if memory not in foreign)
    kept = sum(nbytes for place, nbytes in enumerate(tally.products) if keeps(place, every, needed))
    full = sum(map(store.nbytes_of, inputs))
    return out, Cost(none, full + kept + tally.attention, full)


def _memories(module: nn.Module, others: Iterable[torch.Tensor]) -> set[int | None]:
    owners = [(param, owner_of(param)) for param in module.parameters()]
    storages = {storage_id(param) if owner is None else storage_id(owner.unit.buffer.full) for param, owner in owners}
    return storages | {storage_id(tensor) for tensor in (*module.buffers(), *others)}


_CODES = (None, Policy.NONE, Policy.SELECTIVE, Policy.FULL)  # the later one wins where ranks differ


class Auto:
    """Measures the calls of the first step.

    Modules of one kind (class, parameters, shapes of the inputs) cost the same, so one of each runs unchanged and is
    measured, and the others are recomputed in full: the first step, too, keeps little more than one module.
    """

    def __init__(self, budget: int, inputs: InputStore, every: int) -> None:
        self.budget = budget
        self._inputs = inputs
        self._every = every
        self._measured_by: dict[Hashable, int] = {}  # kind -> number of the measured module
        self._costs: dict[Hashable, Cost] = {}
        self._calls: list[list[tuple[int, Hashable]]] = [[]]  # by backward: modules in the order of their forwards

    def call(
        self, number: int, module: nn.Module, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """Record a call of module `number`. Run and measure it if due: (True, its result), else (False, None)."""
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors_in((tuple(args), dict(kwargs)))]
        kind = (type(module), sum(param.numel() for param in module.parameters()), tuple(shapes))
        if not in_backward():
            self._calls[-1].append((number, kind))
        if self._measured_by.setdefault(kind, number) != number:
            return False, None
        out, cost = measured(module, fn, args, kwargs, self._inputs, self._every)
        self._costs[kind] = cost.most(self._costs.get(kind, Cost()))
        return True, out

    def backward_ended(self) -> None:
        """Begin a new forward."""
        if self._calls[-1]:
            self._calls.append([])

    def choose(self) -> Choice:
        """The choice for this rank's forward that keeps most."""
        choices = []
        for calls in self._calls:
            costs: dict[int, Cost] = {}
            for number, kind in calls:
                if kind in self._costs:  # else the measured forward has raised
                    costs[number] = self._costs[kind].most(costs.get(number, Cost()))
            choices.append(choose([number for number, _ in calls if number in costs], costs, self.budget))
        policies: dict[int, Policy] = {}
        for choice in choices:
            for number, policy in choice.policies.items():
                policies[number] = max(policy, policies.get(number, policy), key=_CODES.index)
        return Choice(policies, max(choice.nbytes for choice in choices))


def agreed(choice: Choice, modules: int, axis: Axis) -> Choice:
    """One choice for all ranks of the axis: for each module what keeps least, FULL if none called it; collective."""
    codes = [_CODES.index(choice.policies.get(number)) for number in range(modules)]
    nbytes, *codes = map(max, zip(*agree([choice.nbytes, *codes], axis), strict=True))
    return Choice({number: _CODES[code] or Policy.FULL for number, code in enumerate(codes)}, nbytes)


def log_choice(choice: Choice, budget: int) -> None:
    """Log the choice."""
    count = Counter(choice.policies.values())
    fits = choice.nbytes <= budget
    rank_zero(
        logging.INFO if fits else logging.WARNING,
        "zero.recompute: of %d modules %d keep all, %d are recomputed but for products and attention, %d in full; "
        "their activations take at most %.2f MiB, %s the budget of %.2f MiB",
        *(len(choice.policies), count[Policy.NONE], count[Policy.SELECTIVE], count[Policy.FULL]),
        *(choice.nbytes / MIB, "within" if fits else "which is more than", budget / MIB),
    )
