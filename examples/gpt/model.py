"""A small byte-level GPT in plain PyTorch. It knows nothing of ranks, shards or the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 256
"""A token is a byte."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a `GPT`: channels, blocks, attention heads per block, and tokens it can look at."""

    width: int = 192
    layers: int = 4
    heads: int = 6
    context: int = 128

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads, self.context) < 1:
            raise ValueError(f"every size of a GPT is at least 1, got {self}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of 2 * heads (rotary pairs), got {self}")


class Block(nn.Module):
    """One transformer block: attention, then a GELU MLP of four times the width, each behind a LayerNorm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x of (batch, tokens, width) to the same shape; cos and sin are (tokens, width / heads / 2)."""
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal self-attention with rotary positions over x of shape (batch, tokens, width)."""
        batch, tokens, width = x.shape
        # (3, batch, heads, tokens, width / heads)
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (first half, second half) of the last dim of x by the angle of their position.

    The angles stay fp32 whatever x is, and so does the product; the result has the dtype of x.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class GPT(nn.Module):
    """Pre-norm decoder over bytes with rotary positions and an untied head.

    `loss`, if given, takes hidden states (batch, tokens, width), the head's weight and targets, and does the work of
    both the head and the mean cross entropy.
    """

    def __init__(self, shape: Shape, loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.loss = loss
        self.embed = nn.Embedding(VOCAB, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCAB, bias=False)
        half = shape.width // shape.heads // 2
        self.cos: Tensor
        self.sin: Tensor
        angles = torch.arange(shape.context)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        # Not parameters and not in a checkpoint: they follow from the shape.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.initialize()

    def initialize(self) -> None:
        """Normal weights; what is added to the residual stream starts smaller, the more blocks add to it."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # biases are overwritten below, norms keep 1 and 0
            residual = name.endswith(("out.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * self.shape.layers) if residual else 0.02
            nn.init.normal_(parameter, std=std)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, tokens, 256), or with targets the mean loss in nats per byte (a scalar).

        Both arguments are int64 of shape (batch, tokens), with no more tokens than the context.
        """
        count = tokens.shape[1]
        if count > self.shape.context:
            raise ValueError(f"{count} tokens do not fit into a context of {self.shape.context}")
        x = self.embed(tokens)
        cos, sin = self.cos[:count], self.sin[:count]
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        if targets is not None and self.loss is not None:
            return self.loss(x, self.head.weight, targets)
        logits = self.head(x)
        if targets is None:
            return logits
        # In fp32, because a sum over 256 exponentials in half precision would cost digits.
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, temperature: float = 0.8, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return `tokens`, int64 (batch, n), with `count` sampled bytes behind them; temperature 0 is greedy.

        Every rank of a sharded model has to call this with the same arguments, since each forward gathers
        weights. `generator` is one of the CPU, so that all ranks and devices draw the same.
        """
        for _ in range(count):
            logits = self(tokens[:, -self.shape.context :])[:, -1].float().cpu()
            if temperature == 0:
                drawn = logits.argmax(dim=-1, keepdim=True)
            else:
                drawn = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat((tokens, drawn.to(tokens.device)), dim=1)
        return tokens
