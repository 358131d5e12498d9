"""What does a step cost whose experts are divided among ranks, beside one that gathers them?

    python benchmarks/experts.py

A small mixture of experts in fp32 at stage 3, ranks of one thread; a step is forward, backward and the update. The
ways take turns, so that what slows the machine down slows both of a pair.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from live import LiveBytes
from measure import bytes_written, machine_line, paired, rotated, run_ranks, slowest, stat, table
from torch import nn

import zero

VOCABULARY, LAYERS, EXPERTS, SLOTS, ROWS, RANKS = 1024, 4, 16, 2, 2, 4
WAYS = {"ep 1: gathered": 1, "ep 2 x efsdp 2": 2, "ep 4: sent tokens": 4}


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) / (2 * width) ** 0.5)
        zero.experts(self, ["up", "down"])

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, slot = torch.where(index == expert)
            out = out.index_add(0, token, F.gelu(x[token] @ up) @ down * weights[token, slot, None])
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(width), nn.Linear(width, width)
        self.router, self.experts = nn.Linear(width, EXPERTS, bias=False), Experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x + self.dense(x)).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(SLOTS)
        return x + self.experts(tokens, index, weights).view_as(x)


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class Trainer:
    """One way: an engine, and the batch of this rank, the same at each step."""

    def __init__(self, ep: int, width: int, length: int) -> None:
        torch.manual_seed(0)
        json: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
            "zero_optimization": {"stage": 3},
            "expert_parallel": {"enabled": ep > 1, "autoep_size": ep},
            "gradient_clipping": 0,
            "log_level": "error",
        }
        self.engine = zero.initialize(model=Model(width), config=json)[0]
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(VOCABULARY, (ROWS, length), generator=generator)

    def step(self) -> torch.Tensor:
        loss = self.engine(self.tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


def times_worker(rank: int, width: int, length: int, turns: int) -> list[list[tuple[float, float]]]:
    """Seconds of a step of the slowest rank and the mean loss, of each way in as many turns, after one not kept."""
    trainers = [Trainer(ep, width, length) for ep in WAYS.values()]
    found: list[list[tuple[float, float]]] = [[] for _ in trainers]
    for turn in range(turns + 1):
        for at in rotated(range(len(trainers)), turn):
            dist.barrier()
            begin = time.perf_counter()
            loss = trainers[at].step()
            seconds = slowest([time.perf_counter() - begin])[0]
            dist.all_reduce(loss)
            if turn:
                found[at].append((seconds, loss.item() / dist.get_world_size()))
    return found


def bytes_worker(rank: int, ep: int, width: int, length: int) -> list[float]:
    """Of the rank with the most: bytes that live between steps, at the peak of the third, and sent by it."""
    with LiveBytes() as live:
        trainer = Trainer(ep, width, length)
        for _ in range(2):
            trainer.step()
        rest = live.now
        live.restart()
        dist.barrier()
        sent = bytes_written()
        trainer.step()
        return slowest([rest, live.peak, bytes_written() - sent])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128, help=f"of {ROWS} rows a rank")
    parser.add_argument("--turns", type=int, default=20, help="timed steps of each way, after one that is not")
    args = parser.parse_args()
    print(machine_line(), flush=True)
    found, rows = run_ranks(times_worker, RANKS, args.width, args.length, args.turns), []
    for (name, ep), each in zip(WAYS.items(), found, strict=True):
        nbytes = run_ranks(bytes_worker, RANKS, ep, args.width, args.length)
        times = stat([1e3 * one for one, _ in each]).text()
        ratio = paired([one for one, _ in each], [one for one, _ in found[0]]).text(3)
        off = max(abs(mine - theirs) for (_, mine), (_, theirs) in zip(each, found[0], strict=True))
        columns = [f"{value / 1e6:,.1f}" for value in nbytes]
        rows.append([name, times, ratio, *columns, f"{each[-1][1]:.6f}", f"{off:.0e}"])
    numel = [sum(param.numel() for param in module.parameters()) for module in (Model(args.width), Experts(args.width))]
    print(f"{numel[0] / 1e6:.1f}M parameters, {LAYERS * numel[1] / 1e6:.1f}M of experts, {RANKS} ranks\n")
    header = ["", "ms/step", "this / ep 1", "MB alive", "at the peak", "sent a step", "last loss", "off ep 1"]
    print(table(header, rows), flush=True)


if __name__ == "__main__":
    main()
