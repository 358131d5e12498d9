"""Train a small language model whose layers are divided among ranks.

    zero run --num_gpus 2 examples/pipeline/train.py

The model is an `nn.Sequential` for one process; `"pipeline": {"stages": 2}` in the JSON is all that divides it. On four
ranks there are two replicas, each of two ranks. The text is the documentation of Python that comes with Python.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import zero

BYTES = 256
LENGTH = 64


class Embedding(nn.Module):
    """Vectors (batch, tokens, width) of bytes (batch, tokens) and their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(BYTES, width), nn.Embedding(LENGTH, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        return self.byte(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """Attention to what came before, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make(width: int, layers: int, heads: int) -> nn.Sequential:
    """Logits (batch, tokens, 256) of bytes (batch, tokens)."""
    blocks = (Block(width, heads) for _ in range(layers))
    return nn.Sequential(Embedding(width), *blocks, nn.LayerNorm(width), nn.Linear(width, BYTES))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a byte in nats, a scalar in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def windows(text: bytes) -> TensorDataset:
    """Cut a text into rows of 64 bytes, each with the bytes that follow its own."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = (len(data) - 1) // LENGTH
    shifted = (data[start : start + rows * LENGTH].view(rows, LENGTH) for start in (0, 1))
    return TensorDataset(*shifted)


def main(argv: list[str] | None = None) -> float:
    """Train and measure; return the loss on text that was not trained on."""
    parser = argparse.ArgumentParser(description="train a language model in stages with the zero engine")
    parser.add_argument("--config", default=str(Path(__file__).with_name("zero.json")), help="JSON of the engine")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    for name, size in {"width": 64, "layers": 6, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    pages = [page.encode() for _, page in sorted(topics.items())]
    learnt = windows(b"".join(page for i, page in enumerate(pages) if i % 10))
    held = windows(b"".join(pages[::10]))
    engine, *_ = zero.initialize(
        model=make(args.width, args.layers, args.heads), config=args.config, training_data=learnt, loss_fn=loss_of
    )
    kept = ", ".join(type(each).__name__ for each in engine.module.children() if any(True for _ in each.parameters()))
    print(f"rank {torch.distributed.get_rank()} has {kept}", flush=True)
    while engine.global_steps < args.steps:
        loss = engine.train_batch()  # all micro-batches of a step, of the training data
        if engine.global_steps % max(1, args.steps // 5) == 0:
            engine.print(f"step {engine.global_steps} loss {loss.item():.3f}")
    loss = engine.eval_batch(iter(engine.deepspeed_io(held, route="eval"))).item()
    engine.print(f"loss on other text: {loss:.3f} nats a byte")
    engine.destroy()
    return loss


if __name__ == "__main__":
    main()
