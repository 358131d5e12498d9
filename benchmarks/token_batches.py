"""What does an epoch of sequences of skewed lengths cost: fixed batches with padding, or batches within a budget?

    python benchmarks/token_batches.py

A small transformer on ranks of one thread, fp32, stage 1, log-normal lengths, the mean over tokens each time. Padded
batches have as many sequences on each rank; budgets are filled by `zero.TokenBatchSampler` and packed, with attention
inside of documents only. Each way is trained for the same epochs, in turns; the validation loss is that of the end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measure import machine_line, run_ranks, stat, table
from torch import nn

import zero

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 128, 4, 4
WAYS = ("padded", "budget, by tokens", "budget, by flops", "budget, by flops, unequal")


class Batch(NamedTuple):
    """Sequences in one row: tokens and targets [n], -100 where nothing counts, and the length of each."""

    tokens: torch.Tensor
    targets: torch.Tensor
    lengths: list[int]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        rows = []
        for part in self.qkv(self.norms[0](x)).split(lengths):
            q, k, v = (each.view(-1, HEADS, WIDTH // HEADS).transpose(0, 1) for each in part.chunk(3, -1))
            rows.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
        x = x + self.out(torch.cat(rows))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A mean over the counted tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.embed(batch.tokens)
        for block in self.blocks:
            x = block(x, batch.lengths)
        return F.cross_entropy(self.head(x), batch.targets, ignore_index=-100)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="time epochs of padded batches and of batches within a budget")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=768)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a padded batch on one rank")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def dataset(count: int, seed: int) -> list[torch.Tensor]:
    """Sequences of a rule with one random token in ten, of log-normal lengths from 8 to 1,024, 64 in the middle."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(count).log_normal_(4.16, 1.0, generator=generator).clamp(8, 1024).long().tolist()
    noise = torch.rand(count, 1025, generator=generator) < 0.1
    tokens = torch.randint(0, VOCABULARY, (count, 1025), generator=generator)
    for at in range(1, 1025):
        tokens[:, at] = tokens[:, at].where(noise[:, at], (5 * tokens[:, at - 1] + 3) % VOCABULARY)
    return [row[: length + 1] for row, length in zip(tokens, lengths, strict=True)]


def row(sequences: list[torch.Tensor], length: int | None = None) -> Batch:
    """These packed into one row, or each padded to a length."""
    tokens, targets = [], []
    for each in sequences:
        more = 0 if length is None else length - (len(each) - 1)
        tokens.append(F.pad(each[:-1], (0, more)))
        targets.append(F.pad(each[1:], (0, more), value=-100))
    return Batch(torch.cat(tokens), torch.cat(targets), [len(each) for each in tokens])


def steps(way: str, data: list[torch.Tensor], epoch: int, args: Any, rank: int) -> Iterator[list[Batch]]:
    """This rank's batches of each step."""
    lengths = [len(each) - 1 for each in data]
    if way == "padded":
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        whole = len(order) // (args.batch * args.ranks) * args.batch * args.ranks
        for start in range(rank * args.batch, whole, args.batch * args.ranks):
            chosen = [data[index] for index in order[start : start + args.batch]]
            yield [row(chosen, max(map(len, chosen)) - 1)]
        return
    unequal = "unequal" in way
    # Of an unequal step some batches are half as large, so that ranks may have one more or one less.
    budget = max(max(lengths), sum(lengths) * args.batch // len(lengths)) // (1 + unequal)
    sampler = zero.TokenBatchSampler(
        lengths,
        max(budget, max(lengths)),
        balance="flops" if "flops" in way else "tokens",
        cost=(6 * WIDTH, 1) if "flops" in way else None,
        accumulation=1 + unequal,
        equal=not unequal,
        rank=rank,
        world_size=args.ranks,
    )
    sampler.set_epoch(epoch)
    for batches in sampler.steps():
        yield [row([data[index] for index in batch]) for batch in batches]


def measured(rank: int, args: Any) -> dict[str, list[tuple[float, int, int, float]]]:
    """By way and round: seconds of the epochs, tokens of all ranks in them, steps, and the validation loss."""
    data, validation = dataset(args.samples, 1), row(dataset(64, 2))
    found: dict[str, list[tuple[float, int, int, float]]] = {way: [] for way in WAYS}
    for number in range(args.rounds + 1):
        for way in WAYS:
            torch.manual_seed(0)
            config = {
                "managed_gradient_accumulation": False,
                "zero": {"mean": "tokens"},
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
                "gradient_clipping": 1.0,
                "steps_per_print": float("inf"),
            }
            engine, *_ = zero.initialize(model=Model(), config=config)
            tokens, begin = 0, time.perf_counter()
            for epoch in range(args.epochs if number else 1):  # the first round warms up
                for batches in steps(way, data, epoch, args, rank):
                    for batch in batches:
                        count = int((batch.targets >= 0).sum())
                        engine.backward(engine(batch), tokens=count)
                        tokens += count
                    engine.step()
            spent = engine.reduce(time.perf_counter() - begin)
            with torch.no_grad():
                loss = float(engine(validation))
            if number:
                found[way].append((spent, engine.reduce(tokens, "sum"), engine.global_steps, loss))
            engine.destroy()
    return found


def main() -> None:
    args = parse()
    found = run_ranks(measured, args.ranks, args)
    rows = []
    plain = [spent for spent, *_ in found["padded"]]
    for way, runs in found.items():
        ratio = stat([spent / other for (spent, *_), other in zip(runs, plain, strict=True)])
        rate = stat([tokens / spent for spent, tokens, *_ in runs])
        spent = stat([run[0] for run in runs])
        rows.append((way, spent.text(1), ratio.text(3), rate.text(), str(runs[0][2]), f"{runs[0][3]:.4f}"))
    print(machine_line())
    header = ("batches", "seconds", "x padded", "tokens/s", "steps", "validation loss")
    print(table(header, rows))


if __name__ == "__main__":
    main()
