"""What does it cost that layers cut over ranks give the same bits at every number of ranks?

    python benchmarks/tensors.py --parts tree

A small transformer in fp32, ranks of one thread; a step is forward, backward and the update. Engines are measured in
turns, so that what slows the machine down slows both of a pair.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import machine_line, paired, rotated, run_ranks, slowest, stat, table
from torch import nn

import zero

VOCABULARY, HEADS, LAYERS, ROWS = 1024, 8, 4, 2


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = width // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in layers)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.attentions = nn.ModuleList(Attention(width) for _ in range(LAYERS))
        self.mlps = nn.ModuleList(Mlp(width) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for at, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * at](x))
            x = x + mlp(self.norms[2 * at + 1](x))
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def made(ranks: int, width: int, **section: Any) -> Any:
    torch.manual_seed(0)
    json = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": ranks} | section,
        "zero": {"reduce": "tree"},  # on both sides of a comparison
        "log_level": "error",
    }
    return zero.initialize(model=Model(width), config=json)[0]


def step(engine: Any, tokens: torch.Tensor) -> float:
    """Seconds of a step, of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    engine.backward(engine(tokens))
    engine.step()
    return slowest([time.perf_counter() - begin])[0]


def tree_worker(rank: int, ranks: int, width: int, length: int, blocks: list[int], steps: int) -> list[list[float]]:
    """Seconds of steps with sums in the backend's order, and with each number of blocks."""
    ways: list[dict[str, Any]] = [{}, *({"reduce": "tree", "blocks": each} for each in blocks)]
    engines = [made(ranks, width, **way) for way in ways]
    tokens = torch.randint(VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(0))
    found: list[list[float]] = [[] for _ in ways]
    for turn in range(steps + 1):
        for at in rotated(range(len(ways)), turn):
            taken = step(engines[at], tokens)
            if turn:
                found[at].append(taken)
    for engine in engines:
        engine.destroy()
    return found


def print_tree(width: int, length: int, blocks: list[int], steps: int) -> None:
    rows = []
    for ranks in (1, 2):
        plain, *trees = run_ranks(tree_worker, ranks, ranks, width, length, blocks, steps)
        for count, each in zip(blocks, trees, strict=True):
            times = [stat([1e3 * one for one in column]).text() for column in (plain, each)]
            rows.append([str(ranks), str(count), *times, paired(each, plain).text(3)])
    print(table(["ranks", "blocks", '"sum", ms', '"tree", ms', "tree / sum"], rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("tree",), default=["tree"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=128, help=f"of {ROWS} rows")
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each kind, after one that is not")
    args = parser.parse_args()
    print(machine_line(), flush=True)
    if "tree" in args.parts:
        print_tree(args.width, args.length, args.blocks, args.steps)


if __name__ == "__main__":
    main()
