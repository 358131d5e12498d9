"""What the libraries write into the JSON beside tensor parallelism, put right before zero reads it."""

import logging
import math
import re
from typing import Any

from torch import nn

from zero.log import log_once
from zero.parallel.tensor.told_sizes import json_sizes


def with_whole_head(values: dict[str, Any], model: Any) -> dict[str, Any]:
    """The JSON with the head left whole of a model in which TRL multiplies by its weight, and does not call it."""
    cut = isinstance(model, nn.Module) and max(json_sizes(values).values(), default=1) > 1
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
