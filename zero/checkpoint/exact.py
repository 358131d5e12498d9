"""Values of a stored parameter, range by range."""

from __future__ import annotations

from collections.abc import Sequence
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


def made_of(name: str, parameter: Parameter, masters: bool = True) -> list[tuple[str, Stored]]:
    """The tensors that `made` makes the exact values of a parameter of, with what they are called in messages.

    `masters`: those of the optimizer, where they are there, and not what the model computed with.
    """
    master = parameter.master if masters else None
    found = [] if master is not None and master.dtype == "fp32" else [(f"weight of '{name}'", parameter.weight)]
    return found if master is None else [*found, (f"master of '{name}'", master)]


def made(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The exact values, fp32 [n] (of a parameter in fp64 or of integers: in its dtype), of as many of `made_of`."""
    if len(parts) == 2:
        return join(*parts)
    return parts[0].float() if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0]


def exact(folder: Path, name: str, parameter: Parameter, start: int, numel: int) -> torch.Tensor:
    """The exact values of elements [start, start + numel); see `made`. Raises Damaged."""
    return made([fetch(folder, stored, start, numel, what) for what, stored in made_of(name, parameter)])
