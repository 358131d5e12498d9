"""`deepspeed.tp_model_init`: what a script says of tensor parallelism before it calls `initialize`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zero.config.unavailable import lookup
from zero.log import log_once

_TOLD = "_zero_tp_model_init"
_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


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
        size = max(_sizes(values).values(), default=1) if mpu is not None else 1
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


def _sizes(values: Mapping[str, Any]) -> dict[str, int]:
    keys = ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size")
    found = {key: lookup(values, key) for key in keys}
    return {key: max(1, size) for key, size in found.items() if type(size) is int}


def _compare(told: _Told, values: Mapping[str, Any]) -> None:
    for key, size in _sizes(values).items():
        if size != told.size:
            raise ValueError(f"{key}: got {size}, and tp_model_init was told {told.size}; keep one of the two")
    for key, dtype in _DTYPES.items():
        if lookup(values, f"{key}.enabled") is True and told.dtype not in (None, dtype):
            raise ValueError(f"Conflicting dtype: {key} is enabled, and tp_model_init was told {told.dtype}")


def with_whole_head(values: dict[str, Any], model: Any) -> dict[str, Any]:
    """The JSON with the head left whole of a model in which TRL multiplies by its weight, and does not call it."""
    cut = isinstance(model, nn.Module) and max(_sizes(values).values(), default=1) > 1
    own: set[int] = set()
    for each in model.modules() if cut else ():
        forward = getattr(each.__dict__.get("forward"), "__func__", None)
        if getattr(forward, "__globals__", {}).get("__name__") == "trl.trainer.utils":
            own |= {id(param) for param in each.get_output_embeddings().parameters()}
    if not own:
        return values
    named = [name for name, each in model.named_parameters(remove_duplicate=False) if id(each) in own]
    log_once(logging.INFO, f"{', '.join(named)}: whole on all ranks, as TRL multiplies by the weight itself")
    given = dict(values["tensor_parallel"].get("partition_config") or {})
    whole = {"patterns": [re.escape(name) for name in named], "partition_type": "skip"}
    given["layer_specs"] = [whole, *given.get("layer_specs", ())]  # the first that matches holds
    return values | {"tensor_parallel": {**values["tensor_parallel"], "partition_config": given}}


def sharing_batches(values: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The JSON with a batch that Transformers has multiplied by all ranks, also those that share theirs, put right."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, steps, train = (values.get(name) for name in names)
    tp = (values.get("tensor_parallel") or {}).get("autotp_size", 1)
    known = all(type(size) is int for size in (micro, steps, train, tp))
    if not known or tp < 2 or train != math.prod((micro, steps, ranks)):
        return values
    log_once(logging.INFO, f"train_batch_size is taken as {train // tp}: {tp} ranks share each batch")
    return values | {"train_batch_size": train // tp}
