"""Small models, data and references that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 12


class Block(nn.Module):
    """A residual block with awkward sizes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head: the shape of a language model with the sizes of a toy."""

    def __init__(self, blocks: int = 3, vocabulary: int = 17) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def make_net(seed: int = 7, **kwargs: Any) -> Net:
    """A Net with seeded weights."""
    torch.manual_seed(seed)
    return Net(**kwargs)


def batch(step: int, size: int, vocabulary: int = 17) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of one micro-step: tokens and targets [size, 5]."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocabulary, (size, 5), generator=generator)
    return tokens, (tokens * 3 + 1) % vocabulary


def config(stage: int, world: int, *, micro: int = 2, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """A JSON for `stage`; further sections as keywords."""
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * world,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "steps_per_print": float("inf"),
        **more,
    }
