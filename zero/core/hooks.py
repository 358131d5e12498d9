"""Ties a module's forward and backward to the gatherer; only where parameters are cut between uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.core.frozen import FrozenCall, FrozenUnits
from zero.core.gathering import Gatherer, in_backward
from zero.core.tensors import tensors_in
from zero.core.unit import Unit


class Reads(NamedTuple):
    """What a module reads: units, and which of them are frozen and anchored at it, where there are such."""

    units: tuple[Unit, ...]
    frozen: FrozenUnits | None


def attach(
    reads: Mapping[nn.Module, Reads], gatherer: Gatherer, begin_backward: Callable[[], None]
) -> dict[nn.Module, list[RemovableHandle]]:
    """Hook every module that reads units. Returns for each the handles that undo it.

    Both the module at which a unit is anchored and every module that owns one of its parameters are hooked:
    the first keeps the unit through a whole block, the others make tied weights, modules called on their
    own, and losses taken from the middle of a block find their parameters.
    """
    handles = {}
    for module, read in reads.items():
        # Closures, not partials or methods: copying a module must not copy the engine along.
        before, after = _forward_hooks(read, gatherer, begin_backward)
        handles[module] = [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]
    return handles


def _forward_hooks(
    read: Reads, gatherer: Gatherer, begin_backward: Callable[[], None]
) -> tuple[Callable[..., None], Callable[..., None]]:
    calls: list[FrozenCall | None] = []  # of this module, those that are in their forward

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        followed = read.frozen is not None and torch.is_grad_enabled() and not in_backward()
        calls.append(read.frozen.call((args, kwargs)) if followed else None)
        gatherer.enter(read.units)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        gatherer.leave(read.units)
        call = calls.pop()
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                # A leaf would keep the hook for ever; it has no backward of ours behind it either.
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda grad: reached(call))

    def reached(call: FrozenCall | None) -> None:
        # The first gradient to come into the module: its backward is about to read the parameters.
        begin_backward()
        gatherer.use(read.units)
        if call is not None:
            call.reached()

    return before, after
