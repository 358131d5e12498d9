"""One call whose activations are computed again in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero.core.torch_private import saves_tensors_by_hooks
from zero.recompute.buffers import Found, as_of, changed, found_in
from zero.recompute.caches import without_caches
from zero.recompute.holder import HOLDER, Scope
from zero.recompute.rest import Rest, restored
from zero.recompute.selective import Contexts


def recomputed(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rest: Rest | None = None,
    contexts: Callable[[], Contexts] | None = None,
    module: nn.Module | None = None,
) -> Any:
    """`fn(*args, **kwargs)`; its graph keeps the inputs, and runs `fn` again when backward comes to it.

    Random numbers (CPU, the current CUDA device, the named streams), autocast and the buffers of `module` are in the
    recomputation as they were, and so are tuples, lists and dicts among the arguments, whatever was done to them
    since. Tensors inside of other objects are kept as they are. `rest` says where inputs go meanwhile, `contexts`
    surround the forward and the recomputations. Key-value caches are left out. Without gradients it is a plain call.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiler has its own recomputation, and its own memory
        return checkpoint(fn, *args, use_reentrant=False, **kwargs)
    args, kwargs = without_caches(args, kwargs, module)
    # Inputs of what lies inside of another call are recomputed with the rest of it; torch's own checkpoint wants to see
    # the same tensors saved both times, and its recomputation is outside of every scope.
    if HOLDER.scope.inside or saves_tensors_by_hooks():
        rest = None
    tensors: list[torch.Tensor] = []
    holes = _taken_out((tuple(args), dict(kwargs)), tensors)
    items = tensors if rest is None else rest.put(tensors)
    streams = HOLDER.seeds.get_states()
    # Around `fn` alone: what restores inputs is no part of what was computed.
    first, later = (contextlib.nullcontext(), contextlib.nullcontext()) if contexts is None else contexts()
    originals = [(args, kwargs)]  # for the forward, which must not find copies; gone when it is over
    buffers: list[Found] = []

    def run(marker: torch.Tensor, *given: Any) -> Any:
        again = not originals
        positional, named = _put_in(holes, iter([restored(item) for item in given])) if again else originals.pop()
        del given
        before = [] if again else found_in(module)
        with contextlib.ExitStack() as around:
            if again:
                around.enter_context(HOLDER.seeds.as_of(streams))
                around.enter_context(as_of(buffers))
            if rest is not None:
                around.enter_context(rest.around(again))
            around.enter_context(HOLDER.within(Scope(None, True)))
            around.enter_context(later if again else first)
            out = fn(*positional, **named)
        buffers.extend(changed(before))
        return out

    del tensors
    try:
        return checkpoint(run, _marker(), *items, use_reentrant=False)
    finally:
        originals.clear()


class _Hole:
    """Where a tensor was."""


_HOLE = _Hole()


def _taken_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with holes for tensors, which are appended to `tensors`; looks into tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _HOLE
    return _each(value, lambda item: _taken_out(item, tensors))


def _put_in(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The reverse: each hole takes the next of `tensors`."""
    return next(tensors) if value is _HOLE else _each(value, lambda item: _put_in(item, tensors))


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(change(item) for item in value)
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(change(item) for item in value))
    return value


def _marker() -> torch.Tensor:
    """Tells torch of the device whose random numbers count, where that may not be seen from the inputs kept."""
    return torch.empty(0, device="cuda" if torch.cuda.is_initialized() else "cpu")
