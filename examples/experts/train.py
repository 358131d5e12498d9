"""Train a small mixture of experts, which ranks divide; its code only says which parameters are stacks of experts.

    zero run --num_gpus 2 --config examples/experts/zero.json examples/experts/train.py
    zero run --num_gpus 4 --config examples/experts/zero.json examples/experts/train.py

Of two ranks each has four of eight experts, and a half of all else; of four two have the same experts, and each a half
of their values. `--set expert_parallel.enabled=false` divides none, and the losses are the same within rounding. The
text is the documentation of Python that comes with Python.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import zero

BYTES, LENGTH, WIDTH, HEADS, LAYERS, EXPERTS = 256, 64, 64, 4, 2, 8


class Attention(nn.Module):
    """To what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        q, k, v = self.within(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Perceptrons of twice the width, whose weights are stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)
        zero.experts(self, ["up", "down"])

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Sum what the experts (tokens, k) of each token (tokens, width) give, times their weights (tokens, k)."""
        out = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, slot = torch.where(index == expert)
            out = out.index_add(0, token, F.gelu(x[token] @ up) @ down * weights[token, slot, None])
        return out


class Mixture(nn.Module):
    """Of each token two experts, as a router says."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        return self.experts(tokens, index, weights / weights.sum(-1, keepdim=True)).view_as(x)


class Block(nn.Module):
    """Both, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mixture = nn.LayerNorm(WIDTH), Mixture()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mixture(self.norm2(x))


class Model(nn.Module):
    """The mean loss, in nats, of bytes (batch, tokens) that follow on others; int64 both."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """See the class."""
        x = self.byte(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def windows() -> TensorDataset:
    """Rows of 64 bytes of the text, each with the bytes that follow its own."""
    text = "".join(page for _, page in sorted(topics.items())).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = (len(data) - 1) // LENGTH
    return TensorDataset(*(data[start : start + rows * LENGTH].view(rows, LENGTH) for start in (0, 1)))


def main(config: dict[str, Any] | None = None, steps: int = 40) -> list[float]:
    """Train, by what `zero run --config` or a caller says; return the loss of each step, of all ranks' samples."""
    torch.manual_seed(0)
    model = Model()
    whole = sum(param.numel() for param in model.parameters())
    engine, _, loader, _ = zero.initialize(model=model, config=config, training_data=windows())
    here, losses = sum(param.numel() for param in model.parameters()), []
    for tokens, targets in loader:
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(engine.reduce(loss.item()))
        if engine.global_steps % max(1, steps // 5) == 0:
            engine.print(f"step {engine.global_steps} loss {losses[-1]:.5f}")
        if engine.global_steps == steps:
            break
    held = f"works with {here:,} of {whole:,} parameters, and keeps {sum(engine.state_nbytes()):,} bytes"
    print(f"rank {engine.global_rank} {held}", flush=True)
    engine.destroy()
    return losses


if __name__ == "__main__":
    main()
