"""`deepspeed.tp_model_init`: what a script says of tensor parallelism before it calls `initialize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zero.config.unavailable import lookup

_TOLD = "_zero_tp_model_init"
DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


class _Told(NamedTuple):
    size: int
    dtype: Any
    group: Any


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, **kwargs: Any) -> nn.Module:
    """Have `initialize` cut the layers of this model over `tp_size` ranks, unless its JSON says so itself.

    Changes nothing else; the dtype is that of the JSON, with which `dtype` must agree. config: the JSON, which is not
    to say another size. kwargs: `tp_group`, the group of the ranks, which are neighbours. Raises ValueError for sizes
    that part; `initialize` does so, too.
    """
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ValueError(f"tp_model_init(tp_size=...): got {tp_size!r}; wanted an integer of at least 1")
    told = _Told(tp_size, dtype, kwargs.get("tp_group"))
    if model.__dict__.get(_TOLD, told)[:2] != told[:2]:
        raise ValueError(f"tp_model_init: got {told[:2]}, and an earlier call {model.__dict__[_TOLD][:2]}; keep one")
    if isinstance(config, Mapping):
        _compare(told, config)
    model.__dict__[_TOLD] = told
    return model


def told_sizes(model: nn.Module, values: Mapping[str, Any], mpu: Any) -> dict[str, int]:
    """The sizes of axes that `tp_model_init` was told for a model; beside an `mpu` also those of the JSON.

    Raises ValueError where one says something else than the other.
    """
    told = model.__dict__.get(_TOLD)
    if told is None:
        size = max(json_sizes(values).values(), default=1) if mpu is not None else 1
    else:
        _compare(told, values)
        size = told.size
        if told.group is not None and mpu is not None:
            raise ValueError("tp_model_init provided tp_group, and initialize() got mpu; keep one of the two")
        if told.group is not None:
            first = dist.get_rank() // size * size
            if (found := dist.get_process_group_ranks(told.group)) != [*range(first, first + size)]:
                raise ValueError(f"tp_model_init(tp_group=...): got ranks {found}; wanted {size} from {first} on")
    return {"tp": size} if size > 1 else {}


def json_sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that the JSON says, by their keys."""
    keys = ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size")
    found = {key: lookup(values, key) for key in keys}
    return {key: max(1, size) for key, size in found.items() if type(size) is int}


def _compare(told: _Told, values: Mapping[str, Any]) -> None:
    for key, size in json_sizes(values).items():
        if size != told.size:
            raise ValueError(f"{key}: got {size}, and tp_model_init was told {told.size}; keep one of the two")
    for key, dtype in DTYPES.items():
        if lookup(values, f"{key}.enabled") is True and told.dtype not in (None, dtype):
            raise ValueError(f"Conflicting dtype: {key} is enabled, and tp_model_init was told {told.dtype}")
