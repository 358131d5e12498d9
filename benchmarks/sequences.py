"""How long a sequence fits when ranks share it, what a token costs, and what travels?

    python benchmarks/sequences.py

A small transformer in fp32, stage 3, blocks recomputed, ranks of one thread. Memory is what the resident set of a rank
grows by in a training step, at its peak; the longest sequence is one of n x 1,024. Times are of steps in turns.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import machine_line, run_ranks, stat, table
from torch import nn

import zero
from zero.plan.sequences import pieces, ring

WIDTH, HEADS, KEY_HEADS, LAYERS, VOCABULARY = 128, 8, 2, 4, 256
HEAD = WIDTH // HEADS
WAYS = ((1, "ring"), (2, "ring"), (2, "ulysses"), (4, "ring"), (4, "ulysses"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pair = nn.Linear(WIDTH, 2 * KEY_HEADS * HEAD)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        query = self.query(y).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        key, value = self.pair(y).unflatten(-1, (2, KEY_HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        x = x + self.out(zero.attention(query, key, value, position_ids=places).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, position_ids: Any = None) -> torch.Tensor:
        x = self.embed(tokens)  # no positions: they would limit the length
        for block in self.blocks:
            x = block(x, position_ids)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def made(ranks: int, mode: str) -> Any:
    torch.manual_seed(0)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "sequence_parallel_size": ranks,
        "zero": {"context": {"mode": mode}, "recompute": {"modules": ["Block"]}},
        "log_level": "error",
    }
    return zero.initialize(model=Model(), config=config)[0]


def step(engine: Any, length: int, document: int = 0) -> float:
    """Train on one row, of documents of one length or all one; the seconds that it took."""
    tokens = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
    positions = torch.arange(length)[None] % (document or length)
    begin = time.perf_counter()
    engine.backward(engine(tokens, tokens.roll(-1, 1), position_ids=positions))
    engine.step()
    return time.perf_counter() - begin


def resident(which: str) -> int:
    """Bytes of this process that are, or were at most, in memory."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which)]
    return int(line.split()[1]) << 10


def memory_worker(rank: int, ranks: int, mode: str, lengths: list[int]) -> dict[int, int]:
    engine = made(ranks, mode)
    step(engine, 1024)
    found = {}
    for length in lengths:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        step(engine, length)
        grown = torch.tensor([resident("VmHWM") - before])
        if ranks > 1:
            torch.distributed.all_reduce(grown, torch.distributed.ReduceOp.MAX)
        found[length] = grown.item()
    engine.destroy()
    return found


def time_worker(rank: int, ranks: int, mode: str, length: int, document: int, steps: int) -> list[float]:
    engine = made(ranks, mode)
    step(engine, length, document)
    found = [step(engine, length, document) for _ in range(steps)]
    engine.destroy()
    return found


def longest(ranks: int, mode: str, limit: int) -> tuple[int, float]:
    """The largest n x 1,024 positions within the limit, and MiB per 1,024 positions."""
    few, many = 4096 * ranks, 8192 * ranks
    found = run_ranks(memory_worker, ranks, ranks, mode, [few, many])
    each = (found[many] - found[few]) / (many - few)
    guess = int((limit - found[few]) / each + few) // 1024
    tried = run_ranks(memory_worker, ranks, ranks, mode, [1024 * (guess + more) for more in range(-1, 3)])
    fitting = [length for length, size in tried.items() if size <= limit]
    return max(fitting, default=0), each * 1024 / 2**20


def sent(ranks: int, borders: tuple[int, ...]) -> list[float]:
    """Bytes of a rank over those of its own keys and values, forward and backward in bf16, mean over the ranks."""
    cut, each = pieces(borders[-1], ranks, True), borders[-1] / ranks
    steps = [step for rank in range(ranks) for step in ring(cut, rank, (borders,), True, 0)[1:]]
    out = sum(len(span) for step in steps for _, span in step.sends) / ranks / each
    return [out, out + 2 * out]  # keys and values again, and their gradients back in fp32


def print_lengths(limit: int) -> None:
    found = {way: longest(*way, limit << 20) for way in WAYS}
    first = found[WAYS[0]][0]
    rows = [
        [f"{ranks} x {mode}", f"{length:,}", f"{length / first:.2f}", f"{each:.2f}"]
        for (ranks, mode), (length, each) in found.items()
    ]
    print(table([f"within {limit} MiB", "longest", "x of one rank", "MiB for 1,024"], rows), flush=True)


def print_times(length: int, rounds: int) -> None:
    times: dict[tuple[int, str, int], list[float]] = {}
    for _ in range(rounds):
        for document in (0, 512, 700):
            for ranks, mode in WAYS[:3]:
                taken = run_ranks(time_worker, ranks, ranks, mode, length, document, 3)
                times.setdefault((ranks, mode, document), []).append(min(taken) / length * 1e6)
    rows = []
    for (ranks, mode, document), values in times.items():
        ratio = stat([mine / one for mine, one in zip(values, times[1, "ring", document], strict=True)])
        what = f"documents of {document}" if document else "one document"
        rows.append([f"{ranks} x {mode}", what, stat(values).text(1), ratio.text(3)])
    print(table([f"{length:,} positions", "of", "us per token", "x of one rank"], rows), flush=True)


def print_bytes() -> None:
    rows = []
    for ranks in (2, 4, 8):
        length = 64 * ranks * 512
        for what, size in (("one document", length), ("documents of 512", 512), ("documents of 700", 700)):
            mine = sent(ranks, (*range(0, length, size), length))
            rows.append([str(ranks), what, *(f"{each:.3f}" for each in (*mine, ranks - 1, 3 * (ranks - 1)))])
    print(table(["ranks", "of", "forward", "backward", "a ring's forward", "a ring's backward"], rows))


def main() -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed is given back
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=64, help="MiB that a step may take on a rank; 0: not searched")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(machine_line())
    if args.limit:
        print_lengths(args.limit)
    print_times(args.length, args.rounds)
    print_bytes()


if __name__ == "__main__":
    main()
