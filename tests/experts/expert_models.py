"""Tiny models with experts: of integers, whose sums are exact in any order, and those of Transformers."""

from __future__ import annotations

import torch
from torch import nn

import zero

VOCABULARY, WIDTH, INNER, ROWS, LENGTH = 13, 4, 3, 2, 6


class Stacks(nn.Module):
    """A loop over experts, which adds up in their order."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.empty(experts, INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(experts, WIDTH, INNER))
        zero.experts(self, ["up", "down"])

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            found = torch.relu(x[token] @ self.up[expert].t()) @ self.down[expert].t()
            out.index_add_(0, token, found * weights[token, slot, None])
        return out


class Mixture(nn.Module):
    """`to`: the expert of all tokens, instead of those of the router."""

    def __init__(self, experts: int, to: int | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = Stacks(experts)
        self.to = to

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        index = scores.topk(2, 1).indices
        if self.to is not None:
            index = torch.stack([torch.full_like(index[:, 0], self.to), (index[:, 0] * 0 + self.to + 1) % scores.shape[1]], 1)
        return self.experts(tokens, index, scores.gather(1, index)).view_as(x)


class Block(nn.Module):
    def __init__(self, experts: int, to: int | None) -> None:
        super().__init__()
        self.mix, self.dense = Mixture(experts, to), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x + self.mix(x))


class Integers(nn.Module):
    def __init__(self, experts: int = 4, to: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(experts, to) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=generator))

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) * weights).sum() / 1024


def integers(number: int, place: int) -> dict[str, torch.Tensor]:
    """The batch of a micro-batch of a data rank."""
    generator = torch.Generator().manual_seed(100 * place + number)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"ids": ids, "weights": torch.randint(-1, 2, (ROWS, LENGTH, VOCABULARY), generator=generator).float()}
