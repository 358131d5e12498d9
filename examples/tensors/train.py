"""Train a small language model whose layers are cut over ranks; its code knows nothing of that, the JSON says it.

    zero run --num_gpus 2 --config examples/tensors/zero.json examples/tensors/train.py
    zero run --num_gpus 4 --config examples/tensors/zero.json examples/tensors/train.py

Of two ranks each has two of four heads, half of the features and half of the head's rows; four are two such pairs, each
with half of the batch. `--set tensor_parallel.autotp_size=1` cuts nothing, and the losses are the same within rounding.
The text is the documentation of Python that comes with Python.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import zero

BYTES, LENGTH, WIDTH, HEADS, LAYERS = 256, 64, 64, 4, 3


class Attention(nn.Module):
    """To what came before, by as many heads as are here; a plan is read from the names of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in layers)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """Of four times the width."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Both, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.perceptron = nn.LayerNorm(WIDTH), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.perceptron(self.norm2(x))


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
        return zero.tiled_cross_entropy(self.norm(x), self.head.weight, targets)


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
