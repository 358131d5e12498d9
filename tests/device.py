"""The device of the engine's tests: the GPU where torch sees one, else the CPU; CUDA_VISIBLE_DEVICES= hides it.

Tests are written for a CPU. On a GPU the engine moves the model there by itself; what surrounds it is moved here: the
inputs of every forward, and what ranks return. Oracles train on the device, too (oracle.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def moved(value: Any, device: torch.device) -> Any:
    """The same with all its tensors on a device; as it is where they are there."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def on_host(value: Any) -> Any:
    """What a rank returns, where it was computed on a GPU."""
    return moved(value, torch.device("cpu")) if torch.cuda.is_available() else value


def feed() -> None:
    """From here on engines of this process take inputs from the CPU, too, where they are on a GPU."""
    if not torch.cuda.is_available():
        return
    from zero.engine.engine import Engine

    forward = Engine.forward

    def fed(self: Engine, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *moved(args, self.device), **moved(kwargs, self.device))

    Engine.forward = fed  # type: ignore[method-assign]
