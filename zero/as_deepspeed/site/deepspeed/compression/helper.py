"""Submodules by their paths."""

import operator
from typing import Any

from torch import nn

from deepspeed._names import finder

__getattr__ = finder(__name__, {})


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """What `model` has under the path, as in "layers.0.mlp"."""
    return operator.attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: nn.Module) -> None:
    """Put `module` there."""
    above, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, name, module)
