"""Small models and data that several tests share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from device import moved
from torch import nn

from zero.core.comm import local_device

WIDTH = 12
CODED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}  # what travels has 8 bits
WIDE = 48  # two matrices of a block have 4656 elements then, enough for moments in bf16 or 8bit


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

    def __init__(self, blocks: int = 3, vocabulary: int = 17, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        tokens, targets = moved((tokens, targets), self.embed.weight.device)  # a plain one may stay on the CPU
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class TiedNet(nn.Module):
    """Tied embedding and head, blocks of these kinds, of which one is frozen, and a buffer."""

    def __init__(self, *kinds: type[nn.Module], frozen: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(kind() for kind in kinds or (Block, Block))
        self.head = nn.Linear(WIDTH, 17)
        self.head.weight = self.embed.weight
        self.blocks[frozen].requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def make_net(seed: int = 7, **kwargs: Any) -> Net:
    """A Net with seeded weights."""
    torch.manual_seed(seed)
    return Net(**kwargs)


def batch(step: int, size: int, vocabulary: int = 17) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of one micro-step: tokens and targets [size, 5]."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocabulary, (size, 5), generator=generator)
    return tokens, (tokens * 3 + 1) % vocabulary


def share(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's two samples of the global batch of micro-step `number`, on its device; all without ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tokens, targets = batch(number, 2 * world)
    return moved((tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]), local_device())


def step(engine: Any, number: int) -> torch.Tensor:
    """One micro-step of a Net on this rank's share; its loss."""
    loss = engine(*share(number))
    engine.backward(loss)
    engine.step()
    return loss.detach()


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
