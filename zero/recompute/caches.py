"""Key-value caches among the arguments of a call that is recomputed: it would fill them twice, so it gets none."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from zero.log import log_once


def without_caches(
    args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments with None for each cache, as Hugging Face's own checkpointing has it; says so once.

    Raises ValueError for a cache that holds something already, which the call would have to attend to.
    """
    found = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not found:
        return args, kwargs
    what = "a function" if module is None else f"a {type(module).__name__}"
    if any(_length(cache, module) for cache in found):
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
    """How many positions it holds of the layer that this module is."""
    inside = () if module is None else module.modules()
    layer = next((each.layer_idx for each in inside if isinstance(getattr(each, "layer_idx", None), int)), 0)
    try:
        return cache.get_seq_length(layer)
    except ValueError:
        return 0  # this layer's state has no positions
