"""A model with all that recomputation may get wrong, and its training with and without."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from models import config, share
from torch import nn
from torch.nn import functional as F

import zero

WIDTH, HEADS, VOCABULARY = 16, 2, 17


class Block(nn.Module):
    """Attention and an MLP with dropout; a tensor, a tuple and a keyword come in."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], *, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        cos, sin = turn
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q * cos, k * sin, v * scale, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Net(nn.Module):
    """Embedding, blocks, head and loss."""

    def __init__(self, blocks: int = 3, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("turn", torch.rand(2, WIDTH // HEADS) + 0.5)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            turn = self.turn.to(x.dtype)
            x = block(x, (turn[0], turn[1]), scale=turn[0, 0])
        return x

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(self.embed(tokens))).flatten(0, 1), targets.flatten())


def make(kind: type[Net] = Net, **kwargs: Any) -> Net:
    """One with seeded weights."""
    torch.manual_seed(5)
    return kind(**kwargs)


def settings(stage: int, section: dict[str, Any], *, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """A JSON with these keys under `zero.recompute`, and further sections."""
    made = config(stage, dist.get_world_size(), accumulation=accumulation, **copy.deepcopy(more))
    if section:
        made.setdefault("zero", {})["recompute"] = section
    return made


def steps(engine: Any, count: int, accumulation: int = 1) -> list[float]:
    """Train; the losses."""
    losses = []
    for step in range(count * accumulation):
        loss = engine(*share(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def result(engine: Any, losses: list[Any]) -> dict[str, Any]:
    """What two runs must have in common to the bit; ends the engine."""
    engine.destroy()
    params = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    return {"losses": losses, "params": params, "drawn": torch.rand(1).item()}


def trained(model: nn.Module, values: dict[str, Any], count: int = 3) -> dict[str, Any]:
    """Train `model` under the JSON `values` from seeded random numbers, which differ between ranks."""
    engine = zero.initialize(model=model, config=values)[0]
    torch.manual_seed(100 + dist.get_rank())
    return result(engine, steps(engine, count, values["gradient_accumulation_steps"]))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs agree in every bit, the random numbers drawn included."""
    params = all(torch.equal(value, other["params"][name]) for name, value in one["params"].items())
    return params and (one["losses"], one["drawn"]) == (other["losses"], other["drawn"])


def all_same(runs: list[dict[str, Any]]) -> None:
    """Each as the first one."""
    for number, run in enumerate(runs):
        assert same(runs[0], run), f"run {number} of {len(runs)} differs"
