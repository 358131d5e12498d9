"""Tiny models with experts, of integers: their sums are exact in any order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from cut_models import MLP, VOCABULARY, WIDTH, json_of
from torch import nn

import zero

INNER = 3


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
    """`only`: the experts that get tokens; None for all."""

    def __init__(self, experts: int, only: tuple[int, ...] | None) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, experts, bias=False), Stacks(experts)
        self.only = only

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        index = scores.topk(2, 1).indices
        if self.only is not None:
            index = torch.tensor(self.only)[index % len(self.only)]
        return self.experts(tokens, index, scores.gather(1, index)).view_as(x)


class Block(nn.Module):
    def __init__(self, experts: int, only: tuple[int, ...] | None) -> None:
        super().__init__()
        self.mix, self.mlp = Mixture(experts, only), MLP(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x + self.mix(x))


class Experts(nn.Module):
    """Integers; with `positions` it takes them, and asks for the sequence, as shared sequences want."""

    def __init__(self, experts: int = 4, only: tuple[int, ...] | None = None, blocks: int = 2, seed: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(experts, only) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=generator))

    def forward(
        self, ids: torch.Tensor, weights: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mean of the logits, each times an integer."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        found = (self.head(x) * weights).sum() / 1024
        if position_ids is not None:
            q = x.detach().unflatten(-1, (2, -1)).transpose(1, 2) * 0
            found = found + 0.0 * zero.attention(q, q, q).sum()
        return found


def json_with(ep: int, stage: int = 0, gas: int = 1, **more: Any) -> dict[str, Any]:
    return json_of(1, stage, gas, expert_parallel={"enabled": ep > 1, "autoep_size": ep}, **more)


class Floats(Experts):
    """Of other numbers, whose scores are never equal: to train for many steps."""

    def __init__(self, experts: int = 4, only: tuple[int, ...] | None = None, blocks: int = 2, seed: int = 3) -> None:
        super().__init__(experts, only, blocks, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(0.3 * torch.randn(param.shape, generator=generator))


class Trained(NamedTuple):
    model: nn.Module
    norms: list[float]


def one_process(
    make: Callable[[], nn.Module],
    steps: Sequence[Sequence[dict[str, torch.Tensor]]],
    optimizer: Callable[..., torch.optim.Optimizer],
    clip: float = math.inf,
) -> Trained:
    """Train by plain torch; each step has these batches."""
    model, norms = make(), []
    made = optimizer([param for param in model.parameters() if param.requires_grad])
    for batches in steps:
        for batch in batches:
            out = model(**batch)
            (getattr(out, "loss", out) / len(batches)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        made.step()
        made.zero_grad()
    return Trained(model, norms)
