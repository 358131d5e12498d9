"""Values that are JSON and tensors, apart from each other: what is written without running anybody's code on load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

_TENSOR = "__tensor__"


def encode(value: Any, what: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """`value` as JSON in which names stand for tensors, and these; ValueError that names what is neither."""
    tensors: dict[str, torch.Tensor] = {}
    return _encoded(value, what, tensors), tensors


def decode(json: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `encode` took apart."""
    if isinstance(json, list):
        return [decode(item, tensors) for item in json]
    if isinstance(json, dict):
        name = json.get(_TENSOR)
        return tensors[name] if name is not None else {key: decode(item, tensors) for key, item in json.items()}
    return json


def _encoded(value: Any, what: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[what] = value
        return {_TENSOR: what}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _TENSOR:
                raise ValueError(f"{what} has the key {key!r}; keys must be strings, and not '{_TENSOR}'")
        return {key: _encoded(item, f"{what}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(item, f"{what}[{index}]", tensors) for index, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"{what} is {value!r:.80} ({type(value).__name__}); a checkpoint holds JSON values and tensors")
