"""Models whose operators are cut over four ranks, and engines for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero

ROWS, WIDTH = 8, 16
WHOLE = (1, 1)


class Products(nn.Module):
    """(X W) V, of which each product may have a strategy, and what is between; integers."""

    def __init__(self, first: Any = None, second: Any = None, between: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = (nn.Parameter(torch.randint(-3, 4, (WIDTH, WIDTH)).float()) for _ in range(2))
        self.one = torch.matmul if first is None else zero.shard(torch.matmul, *first)
        self.two = torch.matmul if second is None else zero.shard(torch.matmul, *second)
        self.between = None if between is None else zero.shard(torch.relu, *between)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.one(x, self.w)
        h = h if self.between is None else self.between(h)
        self.layout = zero.layout(h)
        return (self.two(h, self.v) * y).sum() / 8


def config(stage: int = 0, accumulation: int = 1, **zero_section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.125}},
        "zero_optimization": {"stage": stage},
        "zero": zero_section,
    }


def engine_of(model: nn.Module, *how: int, **zero_section: Any) -> Any:
    return zero.initialize(model=model, config=config(*how, **zero_section))[0]


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all ranks; integers."""
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randint(-2, 3, (ROWS, WIDTH), generator=generator).float() for _ in range(2))
    return x, y
