"""One call whose activations are recomputed in the backward."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zero.core.kept import Values
from zero.core.torch_private import saves_tensors_by_hooks, version_of
from zero.log import log_once
from zero.recompute.holder import HOLDER, Scope
from zero.recompute.saved_inputs import InputStore, restored
from zero.recompute.selective import Contexts


def without_caches(
    args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments with None for each empty key-value cache; logs that once. ValueError for a cache that is filled."""
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return args, kwargs
    what = "a function" if module is None else f"a {type(module).__name__}"
    if any(_length(cache, module) for cache in caches):
        raise ValueError(
            f"{what} that is recomputed is given a key-value cache that is filled already, and would add to it twice; "
            "train without a prefix in the cache, or leave the module out of zero.recompute.modules"
        )
    log_once(
        logging.WARNING,
        f"{what} that is recomputed is given no key-value cache, which it would fill twice; the cache that the model "
        "returns lacks its part. Train with use_cache=False",
    )
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    return tuple(None if _is_cache(value) else value for value in args), kept


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def _length(cache: Any, module: nn.Module | None) -> int:
    """The number of positions that the cache holds for this module's layer."""
    inside = () if module is None else module.modules()
    layer = next((each.layer_idx for each in inside if isinstance(getattr(each, "layer_idx", None), int)), 0)
    try:
        return cache.get_seq_length(layer)
    except ValueError:
        return 0  # the state of this layer has no positions


class SavedBuffer(NamedTuple):
    """A buffer before a forward; `values` are its values, a copy unless they belong to a graph."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    values: torch.Tensor


def saved_buffers(module: nn.Module | None) -> list[SavedBuffer]:
    """All buffers of `module`, saved before a forward that may change them."""
    buffers: list[SavedBuffer] = []
    copies: dict[int, torch.Tensor] = {}  # one per tensor, for all its names
    for owner in module.modules() if module is not None else ():
        for name, tensor in owner._buffers.items():
            if tensor is None:
                continue
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor if tensor.requires_grad else tensor.clone()
            buffers.append(SavedBuffer(owner, name, tensor, version_of(tensor), copies[id(tensor)]))
    return buffers


def changed(buffers: list[SavedBuffer]) -> list[SavedBuffer]:
    """The buffers that were written or replaced since, and all of their owners': batch norm's writes do not show."""
    owners = {
        each.owner
        for each in buffers
        if each.owner._buffers.get(each.name) is not each.tensor or version_of(each.tensor) != each.version
    }
    return [each for each in buffers if each.owner in owners]


@contextlib.contextmanager
def as_of(buffers: list[SavedBuffer]) -> Iterator[None]:
    """Inside, the buffers have their saved values; writes inside are undone."""
    now = [(each, each.owner._buffers.get(each.name)) for each in buffers]
    copies: dict[int, torch.Tensor] = {}  # several recomputations of one call start from the same values
    for each in buffers:
        values = each.values
        if id(values) not in copies:
            copies[id(values)] = values if values.requires_grad else values.clone()
        each.owner._buffers[each.name] = copies[id(values)]
    try:
        yield
    finally:
        for each, tensor in now:
            each.owner._buffers[each.name] = tensor


def recomputed(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: InputStore | None = None,
    contexts: Callable[[], Contexts] | None = None,
    module: nn.Module | None = None,
) -> Any:
    """`fn(*args, **kwargs)`; its graph keeps the inputs, and runs `fn` again when the backward reaches it.

    The recomputation has the same random numbers (CPU, the current CUDA device, the named streams), autocast and
    buffers of `module`, and the same tuples, lists and dicts among the arguments, even if they were changed since.
    Tensors inside other objects are kept unchanged. `inputs` stores the arguments meanwhile, `contexts` surround the
    forward and the recomputations. Key-value caches become None. Without gradients it is a plain call.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiler decides recomputation and memory itself
        return checkpoint(fn, *args, use_reentrant=False, **kwargs)
    args, kwargs = without_caches(args, kwargs, module)
    # Inputs of a call inside another recomputed call are recomputed with it; torch's own checkpoint requires
    # the same saved tensors both times, and its recomputation is outside of every scope.
    if HOLDER.scope.inside or saves_tensors_by_hooks():
        inputs = None
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    items = leaves if inputs is None else inputs.put(leaves)
    streams = HOLDER.seeds.get_states()
    # Around `fn` only: restoring inputs is not part of the computation.
    first, later = (contextlib.nullcontext(), contextlib.nullcontext()) if contexts is None else contexts()
    originals = [(args, kwargs)]  # for the forward, which must not get copies; dropped after it
    buffers: list[SavedBuffer] = []
    values = Values()

    def run(marker: torch.Tensor, *stored: Any) -> Any:
        again = not originals
        positional, named = tree_unflatten(map(restored, stored), structure) if again else originals.pop()
        del stored
        before = [] if again else saved_buffers(module)
        with contextlib.ExitStack() as around:
            if again:
                around.enter_context(HOLDER.seeds.as_of(streams))
                around.enter_context(as_of(buffers))
            if inputs is not None:
                around.enter_context(inputs.around(again))
            around.enter_context(HOLDER.within(Scope(None, HOLDER.scope.inside + 1)))
            around.enter_context(values.running())
            around.enter_context(later if again else first)
            out = fn(*positional, **named)
        buffers.extend(changed(before))
        return out

    del leaves
    # Tells torch whose device's random state counts, if the kept inputs do not show it.
    marker = torch.empty(0, device="cuda" if torch.cuda.is_initialized() else "cpu")
    try:
        return checkpoint(run, marker, *items, use_reentrant=False)
    finally:
        originals.clear()
