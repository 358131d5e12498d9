"""The residual network of the examples, and batches of pictures for it."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location

import torch
from pages import ROOT
from torch import nn

KINDS, SIDE = 5, 16


def small() -> nn.Module:
    """The same weights each time."""
    spec = spec_from_file_location("example_resnet", ROOT / "examples" / "pipeline" / "resnet.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(7)
    return module.ResNet(kinds=KINDS)


def pictures(number: int, place: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch `number` of the data-parallel rank at `place`, and the kinds of its pictures."""
    generator = torch.Generator().manual_seed(1000 * place + number)
    x = torch.randn(rows, 3, SIDE, SIDE, generator=generator)
    return x, torch.randint(KINDS, (rows,), generator=generator)
