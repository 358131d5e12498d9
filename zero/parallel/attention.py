"""Attention where ranks share a sequence: the function that models call, and in place of torch's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from zero.parallel import ring, ulysses
from zero.parallel.ring import Masking
from zero.parallel.sequence import Sequence, whole_sequence

# Models call a function that knows no engine. Its answer is that of the module that runs on this thread, if it is of an
# engine whose ranks share sequences: the mode, and the sequence of queries of this shape.
Shared = Callable[[torch.Tensor, torch.Tensor], "tuple[str, Sequence] | None"]
RUNNING: ContextVar[Shared | None] = ContextVar("zero_shared_sequence", default=None)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of queries [rows, heads, size, dim] to keys and values [rows, heads or a divisor, size, dim].

    In a model that an engine runs with `sequence_parallel_size`, `size` is of this rank's piece, and all see the whole
    sequence, by documents where the forward was given `position_ids` or a mask; else they see what is given. causal:
    no key behind the query; window: so many keys up to the query, itself included, 0 for all, only where causal; scale:
    of the products, default dim ** -0.5. Returns [rows, heads, size, dim]. ValueError for what does not fit.
    """
    if window and not causal:
        raise ValueError(f"attention(window={window}): wanted causal=True, or no window")
    masking = Masking(causal, window)
    query, key, value = _in_one_dtype(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found = shared(query, key)
    if found is None:
        return ring.attend(query, key, value, whole_sequence(len(query), query.shape[2]), masking, scale)
    mode, sequence = found
    if mode == "ring":
        return ring.attend(query, key, value, sequence, masking, scale)
    alone = sequence.alone()
    return ulysses.attend(query, key, value, sequence.axis, lambda *parts: ring.attend(*parts, alone, masking, scale))


def shared(query: torch.Tensor, key: torch.Tensor) -> tuple[str, Sequence] | None:
    """The mode and the sequence of an attention that runs, None where the ranks share none."""
    ask = RUNNING.get()
    return None if ask is None else ask(query, key)


def _in_one_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As torch's own operator under autocast."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
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
