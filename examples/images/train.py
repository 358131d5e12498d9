"""Classify small pictures with a convolutional network, on as many ranks as it is started with.

    zero run --num_gpus 2 examples/images/train.py

The pictures are drawn here: noisy crosses, rings, stripes and the like. Their numbers divide by no batch. So the last
batch is smaller, and an evaluation over several ranks is padded. The accuracy counts each picture once all the same,
because `engine.gather_for_metrics` drops the padding.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import zero

SIDE = 16
KINDS = ("rows", "columns", "diagonals", "ring", "cross", "disc")


def draw(count: int, seed: int) -> TensorDataset:
    """Make `count` pictures [count, 1, 16, 16] in fp32, and the index of the kind of each [count], int64."""
    random = torch.Generator().manual_seed(seed)
    kinds = torch.randint(len(KINDS), (count,), generator=random)
    # Where the middle is, how large the figure, and how far its stripes are moved.
    y0, x0, size, shift = (torch.rand(4, count, 1, 1, generator=random) * 6 + 5).unbind()
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    away = ((y - y0) ** 2 + (x - x0) ** 2).sqrt()
    masks = (
        (y + shift) % 4 < 2,
        (x + shift) % 4 < 2,
        (x + y + shift) % 5 < 2.5,
        (away - size / 2).abs() < 1,
        ((y - y0).abs() < 1) | ((x - x0).abs() < 1),
        away < size / 2,
    )
    stacked = torch.stack([mask.expand(count, SIDE, SIDE) for mask in masks])  # (kinds, count, 16, 16)
    pictures = stacked[kinds, torch.arange(count)].float() + 0.8 * torch.randn(count, SIDE, SIDE, generator=random)
    return TensorDataset(pictures[:, None], kinds)


class Block(nn.Module):
    """Two convolutions with batch norm and a way around them; halves the sides where it changes the channels."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        stride = 1 if channels == out else 2
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.around = nn.Identity() if stride == 1 else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x of (batch, channels, side, side) to (batch, out, side, side), or half the sides."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.around(x))


class Classifier(nn.Module):
    """Logits (batch, 6) of pictures (batch, 1, 16, 16)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([Block(width, width), Block(width, 2 * width), Block(2 * width, 4 * width)])
        self.head = nn.Linear(4 * width, len(KINDS))

    def forward(self, pictures: Tensor) -> Tensor:
        """See the class."""
        x = self.stem(pictures)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def share_statistics(engine: Any) -> None:
    """Give all ranks the mean of their running statistics: each has only seen its own part of the data."""
    for buffer in engine.module.buffers():
        buffer.copy_(engine.reduce(buffer) if buffer.is_floating_point() else buffer)


@torch.no_grad()
def accuracy(engine: Any, loader: Iterable[Any]) -> tuple[float, int]:
    """Return the share of the pictures of a loader that are named right, and how many there are."""
    share_statistics(engine)
    engine.eval()
    right = total = 0
    for pictures, kinds in loader:
        named = engine(pictures.to(engine.device)).argmax(dim=1)
        named, kinds = engine.gather_for_metrics((named, kinds.to(engine.device)))
        right += int((named == kinds).sum())
        total += len(kinds)
    engine.train()
    return right / total, total


def main(argv: list[str] | None = None) -> float:
    """Train and evaluate; return the accuracy."""
    parser = argparse.ArgumentParser(description="classify small pictures with the zero engine")
    parser.add_argument("--config", default=str(Path(__file__).with_name("zero.json")), help="JSON of the engine")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=2001, help="that it learns from; it is measured on 777 others")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    engine, _, loader, _ = zero.initialize(
        model=Classifier(), config=args.config, training_data=draw(args.pictures, seed=1)
    )
    measured = engine.deepspeed_io(draw(777, seed=2), batch_size=64, route="eval")
    share = 0.0
    for epoch in range(args.epochs):
        for pictures, kinds in loader:
            loss = F.cross_entropy(engine(pictures.to(engine.device)), kinds.to(engine.device))
            engine.backward(loss)
            engine.step()
        share, total = accuracy(engine, measured)
        engine.print(f"epoch {epoch + 1} loss {loss.item():.3f} accuracy {share:.2%} of {total} pictures")
    engine.destroy()
    return share


if __name__ == "__main__":
    main()
