"""Stands in for flash_attn, which OpenRLHF imports though SFT without packing calls none of it, and for a CUDA device.

What it imports can be named, and raises when it is called. Where there is no GPU, ranks stay on the CPU.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

_NAMES = {
    "bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "utils": (),
    "utils.distributed": ("all_gather",),
}


def _absent(name: str) -> Any:
    def call(*args: Any, **more: Any) -> None:
        raise NotImplementedError(f"{name}: the stand-in for flash_attn does not compute")

    return call


for _module, _names in _NAMES.items():
    _name = f"{__name__}.{_module}"
    sys.modules[_name] = ModuleType(_name)
    for _each in _names:
        setattr(sys.modules[_name], _each, _absent(f"{_name}.{_each}"))

if not torch.cuda.is_available():
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda device=None: None
