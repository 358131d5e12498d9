"""Attention where ranks share a sequence: the function that models call, and in place of torch's own."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from zero.core.torch_private import backward_task
from zero.parallel import ring, ulysses
from zero.parallel.ring import Masking
from zero.parallel.sequence import Sequence, whole_sequence


class SharingEngine(Protocol):
    """An engine whose ranks share sequences."""

    model: Any  # what a model of transformers asks for: a SharedModel, which is above this module
    shares: bool  # whether attention that runs now is over shared sequences

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> tuple[str, Sequence] | None:
        """The mode, and the sequence of queries of this shape, None where they are of none that is shared."""


# Models call a function that knows no engine: it asks that of the module that runs on this thread. What is recomputed
# in a backward may run outside of modules, and on a thread of autograd: then the only engine that awaits a backward.
RUNNING: ContextVar[SharingEngine | None] = ContextVar("zero_shared_sequence", default=None)
LIVE: weakref.WeakSet[Any] = weakref.WeakSet()


def running() -> SharingEngine | None:
    """The engine whose model attends now; None for a model of none, or of one whose ranks share no sequences."""
    engine = RUNNING.get()
    if engine is not None or backward_task() < 0:
        return engine
    awaiting = [each for each in LIVE if each.shares]
    if len(awaiting) > 1:
        raise RuntimeError(
            f"recomputed attention: it may be of {len(awaiting)} engines that share sequences and await a backward; "
            "recompute modules, not functions, or run each engine's backward before the next one's forward"
        )
    return awaiting[0] if awaiting else None


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries [rows, heads, size, dim] to keys and values [rows, heads or a divisor, size, dim].

    In a model that an engine runs with `sequence_parallel_size`, `size` is of this rank's piece, and all see the whole
    sequence, by documents where the forward was given `position_ids` or a mask; else they see what is given, inside of
    documents that begin where `position_ids` [rows or 1, size] do not count on. So give them here, too. causal:
    no key behind the query; window: so many keys up to the query, itself included, 0 for all, only where causal; scale:
    of the products, default dim ** -0.5. Returns [rows, heads, size, dim]. ValueError for what does not fit.
    """
    if window and not causal:
        raise ValueError(f"attention(window={window}): wanted causal=True, or no window")
    masking = Masking(causal, window)
    query, key, value = _in_one_dtype(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attend(query, key, value, masking, scale, position_ids)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masking: Masking,
    scale: float,
    position_ids: torch.Tensor | None,
) -> torch.Tensor:
    found = shared(query, key)
    if found is None:
        here = whole_sequence(len(query), query.shape[2], position_ids)
        return ring.attend(query, key, value, here, masking, scale)
    mode, sequence = found
    if mode == "ring":
        return ring.attend(query, key, value, sequence, masking, scale)
    alone = sequence.alone()
    return ulysses.attend(query, key, value, sequence.axis, lambda *parts: ring.attend(*parts, alone, masking, scale))


def keep_out_compiler() -> None:
    """Have compiled code call attention as it is, by each forward's documents. Imports the compiler: over a second."""
    global _attend
    if not hasattr(_attend, "_torchdynamo_orig_callable"):
        _attend = torch.compiler.disable(_attend)


def shared(query: torch.Tensor, key: torch.Tensor) -> tuple[str, Sequence] | None:
    """The mode and the sequence of an attention that runs, None where the ranks share none."""
    engine = running()
    return None if engine is None else engine(query, key)


def _in_one_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in the dtype of autocast, where it is enabled, as torch's own operator takes them."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(each.to(torch.get_autocast_dtype(kind)) for each in tensors)


@contextlib.contextmanager
def shared_attention() -> Iterator[None]:
    """Inside, `F.scaled_dot_product_attention` is `zero.attention`; in the forward of a model, around its own calls.

    So the recomputation of a block has it, too. Raises ValueError for a mask of attention and for dropout in it.
    """
    with _InPlace():
        yield


class _InPlace(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return _replacement(*args, **kwargs) if func is scaled_dot_product_attention else func(*args, **kwargs)


def _replacement(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    del enable_gqa  # fewer key heads are always shared out
    refuse(attn_mask, dropout_p)
    return attention(query, key, value, causal=is_causal, scale=scale)


def refuse(mask: Any, dropout: float, **others: Any) -> None:
    """Raise ValueError for what attention over a shared sequence does not do."""
    if mask is not None:
        raise ValueError(
            "attention over a shared sequence: got a mask of the scores; give the model position_ids, or an "
            "attention_mask [rows, length], by which documents and padding are told"
        )
    if dropout:
        raise ValueError(
            f"attention over a shared sequence: got dropout {dropout} inside of it; set it to 0 in the "
            "model's config (attention_dropout, attn_pdrop or attention_probs_dropout_prob)"
        )
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"attention over a shared sequence: got {name}, which it does not compute")
