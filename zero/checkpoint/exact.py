"""Values of a stored parameter, range by range."""

from __future__ import annotations

from pathlib import Path

import torch

from zero.checkpoint.index import Parameter, Stored
from zero.checkpoint.safe_file import DTYPES, read
from zero.kernels.remainder import join


def fetch(folder: Path, stored: Stored, start: int, numel: int, what: str) -> torch.Tensor:
    """Elements [start, start + numel) of a tensor, [numel] in the stored dtype; raises Damaged, naming `what`."""
    out = torch.empty(numel, dtype=DTYPES[stored.dtype])
    read(folder, stored, start, out, what)
    return out


def exact(folder: Path, name: str, parameter: Parameter, start: int, numel: int, masters: bool = True) -> torch.Tensor:
    """The exact values of a parameter, fp32 [numel] (of one in fp64 or of integers: in its dtype).

    `masters`: those of the optimizer, where they are there, and not what the model computed with.
    """
    if masters and parameter.master is not None and parameter.master.dtype == "fp32":
        return fetch(folder, parameter.master, start, numel, f"master of '{name}'")
    weight = fetch(folder, parameter.weight, start, numel, f"weight of '{name}'")
    if masters and parameter.master is not None:
        return join(weight, fetch(folder, parameter.master, start, numel, f"master of '{name}'"))
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight
