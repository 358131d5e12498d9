"""What DTensor of torch 2.13 gives wrong of pieces without a word, as tests/operators/test_rules.py sees: refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

_RUNNING = {"cumprod", "cumsum", "logcumsumexp"}


def fault_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call with pieces would be wrong; None for all that we know nothing against."""
    name = getattr(function, "__name__", "").rstrip("_")
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
    cuts = [{each.dim for each in x.placements if isinstance(each, Shard)} for x in tensors]
    first, others = next(iter(cuts), set()), cuts[1:]
    if name.startswith("conv") and (first - {0} or any(others)):
        return "of a convolution only the samples are cut"
    if name.endswith(("_loss", "cross_entropy")) and first and _reduction(function, args, kwargs) == "mean":
        return "the mean of a loss divides by the elements of one rank; take reduction='sum' and divide"
    if name in _RUNNING and tensors[0].ndim + (kwargs["dim"] if "dim" in kwargs else args[1]) in first:
        return "sums along a dim that is cut are those of one rank"
    return None


def _reduction(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments.get("reduction", "mean")
    except ValueError:  # of torch's built-in ones, which take a number
        return "mean"
