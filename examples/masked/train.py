"""Learn to fill gaps in text, as BERT does, on as many ranks as it is started with.

    zero run --num_gpus 2 examples/masked/train.py

The text is the documentation of Python that comes with Python; a token is a byte. In each window 15 % of the bytes are
chosen: most are replaced by a mask, and the model, which sees what is before and behind, says what was there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import zero

MASK = 256  # the token behind the 256 bytes
IGNORED = -100  # the target of a byte that was not chosen
SHARE = 0.15


class Gaps(Dataset):
    """`count` windows of `length` bytes of a text; an item is (what the model sees, what it is to say).

    Both are int64 of shape (length,). Which bytes are chosen follows from the index, so an item is the same on every
    rank and in every run. All windows have as many, so that the mean over ranks is the mean over bytes.
    """

    def __init__(self, text: bytes, length: int, count: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length, self.count, self.seed = length, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        begin = int(torch.randint(len(self.text) - self.length, (), generator=random))
        seen = self.text[begin : begin + self.length].long()
        targets = torch.full_like(seen, IGNORED)
        chosen = torch.randperm(self.length, generator=random)[: round(SHARE * self.length)]
        targets[chosen] = seen[chosen]
        # Of those that are chosen 80 % are masked, 10 % become another byte, and 10 % stay.
        masked, other = len(chosen) * 8 // 10, len(chosen) * 9 // 10
        seen[chosen[:masked]] = MASK
        seen[chosen[masked:other]] = torch.randint(256, (other - masked,), generator=random)
        return seen, targets


class Encoder(nn.Module):
    """A transformer that looks both ways; the head shares its weight with the embedding."""

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(MASK + 1, width)
        # A byte says most about its neighbours; attention alone would take long to learn where those are.
        self.around = nn.Conv1d(width, width, kernel_size=7, padding=3)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, MASK + 1)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, tokens, 257) of int64 tokens (batch, tokens)."""
        x = self.embed(tokens)
        x = x + self.around(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of the chosen bytes in nats, a scalar in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def measure(engine: Any, loader: Any) -> tuple[float, int]:
    """Return the share of the chosen bytes of a loader that are guessed right, and how many there are."""
    engine.eval()
    right = total = 0
    for tokens, targets in loader:
        guessed = engine(tokens.to(engine.device)).argmax(dim=-1)
        guessed, targets = engine.gather_for_metrics((guessed, targets.to(engine.device)))
        chosen = targets != IGNORED
        right += int((guessed == targets)[chosen].sum())
        total += int(chosen.sum())
    engine.train()
    return right / total, total


def texts() -> tuple[bytes, bytes]:
    """Return the text to learn from, and that to be measured on: each tenth topic."""
    pages = [page.encode() for _, page in sorted(topics.items())]
    return b"".join(page for i, page in enumerate(pages) if i % 10), b"".join(pages[::10])


def main(argv: list[str] | None = None) -> float:
    """Train and measure; return the share of bytes that are guessed right."""
    parser = argparse.ArgumentParser(description="fill gaps in text with the zero engine")
    parser.add_argument("--config", default=str(Path(__file__).with_name("zero.json")), help="JSON of the engine")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--width", type=int, default=96)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model = Encoder(args.width)
    learnt, measured = texts()
    engine, _, loader, _ = zero.initialize(
        model=model, config=args.config, training_data=Gaps(learnt, 96, 20_000, seed=1)
    )
    held = engine.deepspeed_io(Gaps(measured, 96, 333, seed=2), batch_size=32, route="eval")
    batches = zero.RepeatingLoader(loader)
    while engine.global_steps < args.steps:
        tokens, targets = next(batches)
        loss = loss_of(engine(tokens.to(engine.device)), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.global_steps % max(1, args.steps // 6) == 0:
            engine.print(f"step {engine.global_steps} loss {loss.item():.3f}")
    share, total = measure(engine, held)
    common = max(measured.count(byte) for byte in set(measured)) / len(measured)
    engine.print(f"{share:.1%} of {total} bytes guessed right; always the most common byte: {common:.1%}")
    engine.destroy()
    return share


if __name__ == "__main__":
    main()
