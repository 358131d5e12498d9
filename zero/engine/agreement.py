"""What all ranks must have in common when an engine is made: the parameters and what the JSON says about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from zero.config import Config
from zero.core.deferred_param import DeferredParam
from zero.core.owner import owner_of

# What decides over numbers and messages. The rest may differ: who logs, where a drive is mounted.
_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("zero_optimization", "zero", "fp16", "bf16", "data_types", "torch_autocast", "communication_data_type"),
    *("optimizer", "gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
    "activation_checkpointing",
)
_OWN = ("nvme_path", "pin_memory", "profile")


def description(model: nn.Module, groups: Sequence[Mapping[str, Any]], settings: Config) -> list[str]:
    """Lines to be compared between ranks: one per key of the configuration, then one per parameter in order."""
    values = settings.model_dump(include=set(_KEYS))
    lines = [line for key in _KEYS if key in values for line in _flat(key, values[key])]
    group_of = {id(param): index for index, group in enumerate(groups) for param in group["params"]}
    for name, param in model.named_parameters():
        trained = f"group {group_of[id(param)]}" if id(param) in group_of else "no group"
        shape, dtype = tuple(param.shape), str(param.dtype).removeprefix("torch.")
        lines.append(
            f"parameter '{name}' {shape} {dtype}, requires_grad={param.requires_grad}, {trained}{_whose(param)}"
        )
    return lines


def _whose(param: nn.Parameter) -> str:
    """Whether an engine still has it; or had it, and has left it cut, so that all ranks must gather it."""
    owner = owner_of(param)
    if owner is None or isinstance(owner.unit, DeferredParam):
        return ""
    if owner.unit.left_by is None:
        return ", of an engine that is still there"
    return ", of an engine that was dropped" if owner.unit.cut else ""


def _flat(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _OWN:
                yield from _flat(f"{path}.{key}", inner)
    else:
        yield f"{path} = {value}"
