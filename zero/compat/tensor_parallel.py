"""`deepspeed.tp_model_init`: what a script says of tensor parallelism before it calls `initialize`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from zero.log import log_once

_SIZE = "_zero_tp_size"


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, **kwargs: Any) -> nn.Module:
    """Have `initialize` cut the layers of this model over `tp_size` ranks, unless its JSON says so itself.

    Changes nothing else; `dtype` the JSON says. config: the JSON, which is not to say another size. Raises ValueError
    for sizes that part, and for a process group: groups follow from the size.
    """
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ValueError(f"tp_model_init(tp_size=...): got {tp_size!r}; wanted an integer of at least 1")
    if kwargs.get("tp_group") is not None:
        raise ValueError("tp_model_init provided tp_group: groups follow from tp_size; leave it out")
    section = config.get("tensor_parallel", {}) if isinstance(config, Mapping) else {}
    if section.get("autotp_size", tp_size) not in (0, tp_size):
        raise ValueError(
            f"tp_model_init(tp_size={tp_size}): tensor_parallel.autotp_size is {section['autotp_size']}; keep one"
        )
    model.__dict__[_SIZE] = tp_size
    return model


def recorded_sizes(model: nn.Module) -> dict[str, int]:
    """The sizes of axes that `tp_model_init` was told for a model."""
    size = model.__dict__.get(_SIZE, 1)
    return {"tp": size} if size > 1 else {}


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
