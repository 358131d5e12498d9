"""What do layers that are cut over ranks cost beside torch's own, and what the same bits at every number of ranks?

    python benchmarks/tensors.py

A small transformer in fp32, ranks of one thread; a step is forward, backward and the update. What is compared takes
turns, so that what slows the machine down slows both of a pair.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from live import LiveBytes
from measure import bytes_written, machine_line, paired, rotated, run_ranks, slowest, stat, table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero

VOCABULARY, HEADS, LAYERS, ROWS = 1024, 8, 4, 2
ADAMW = {"lr": 1e-3, "weight_decay": 0.0}
Step = Callable[[], torch.Tensor]  # of all ranks; the loss of this rank


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


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(self.blocks(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def tokens_of(group: int, length: int) -> torch.Tensor:
    """The batch [ROWS, length] of the ranks that share layers, the same at each step."""
    return torch.randint(VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(group))


def ours(ranks: int, width: int, tokens: torch.Tensor, stage: int = 1, sums: str = "auto", **section: Any) -> Step:
    """Layers over `ranks` neighbours, and a stage of ZeRO over the others; sums: their `zero.reduce`."""
    torch.manual_seed(0)
    json = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": ranks} | section,
        "gradient_clipping": 0,
        "zero": {"reduce": sums},
        "log_level": "error",
    }
    engine = zero.initialize(model=Model(width), config=json)[0]

    def step() -> torch.Tensor:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def torchs(ranks: int, width: int, tokens: torch.Tensor, reshard: bool) -> Step:
    """`parallelize_module` over `ranks` neighbours, and `fully_shard` on each block and the root over the others."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("dp", "tp"))
    inner = dict.fromkeys(("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"), ColwiseParallel())
    outer = dict.fromkeys(("attention.o_proj", "mlp.fc2"), RowwiseParallel())
    model = Model(width)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], inner | outer)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], ends)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
    meshes: dict[Any, list[nn.Parameter]] = {}
    for param in model.parameters():  # an update of many tensors at once takes no two meshes
        meshes.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    optimizers = [torch.optim.AdamW(group, **ADAMW, fused=True) for group in meshes.values()]

    def step() -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def timed(step: Step) -> tuple[float, float]:
    """Seconds of a step of the slowest rank, and the mean loss of all."""
    dist.barrier()
    begin = time.perf_counter()
    loss = step()
    seconds = slowest([time.perf_counter() - begin])[0]
    dist.all_reduce(loss)
    return seconds, loss.item() / dist.get_world_size()


def in_turns(steps: list[Step], turns: int) -> list[list[tuple[float, float]]]:
    """What `timed` finds of each, in as many turns, after one that is not kept."""
    found: list[list[tuple[float, float]]] = [[] for _ in steps]
    for turn in range(turns + 1):
        for at in rotated(range(len(steps)), turn):
            one = timed(steps[at])
            if turn:
                found[at].append(one)
    return found


# -- beside torch's own

WAYS: dict[str, Callable[[int, int, torch.Tensor], Step]] = {
    "zero, stage 1": ours,
    "zero, stage 3": lambda *args: ours(*args, stage=3),
    "torch, parameters kept for the backward": lambda *args: torchs(*args, reshard=False),
    "torch, its default": lambda *args: torchs(*args, reshard=True),
}


def times_worker(rank: int, cut: int, width: int, length: int, turns: int) -> list[list[tuple[float, float]]]:
    return in_turns([way(cut, width, tokens_of(rank // cut, length)) for way in WAYS.values()], turns)


def bytes_worker(rank: int, name: str, cut: int, width: int, length: int) -> list[float]:
    """Of the rank with the most: bytes that live between steps, at the peak of the third, and sent by it."""
    tokens = tokens_of(rank // cut, length)
    with LiveBytes() as live:
        step = WAYS[name](cut, width, tokens)
        for _ in range(2):
            step()
        rest = live.now
        live.restart()
        dist.barrier()
        sent = bytes_written()
        step()
        return slowest([rest, live.peak, bytes_written() - sent])


def print_times(cut: int, width: int, length: int, turns: int) -> None:
    numel = sum(param.numel() for param in Model(width).parameters())
    found = run_ranks(times_worker, 4, cut, width, length, turns)
    rows = []
    for name, each in zip(WAYS, found, strict=True):
        ratio = paired([one for one, _ in found[0]], [one for one, _ in each])
        nbytes = run_ranks(bytes_worker, 4, name, cut, width, length)
        columns = [f"{value / 1e6:,.1f}" for value in nbytes]
        off = max(abs(mine - theirs) for (_, mine), (_, theirs) in zip(found[0], each, strict=True))
        rows.append(
            [
                name,
                stat([1e3 * one for one, _ in each]).text(),
                ratio.text(3),
                *columns,
                f"{each[-1][1]:.6f}",
                f"{off:.0e}",
            ]
        )
    print(f"{numel / 1e6:.1f}M parameters, 4 ranks, layers over {cut}, {ROWS} x {length} tokens, {turns} turns\n")
    header = ["", "ms/step", "zero / this", "MB alive", "at the peak", "sent a step", "last loss", "off zero"]
    print(table(header, rows), "\n", flush=True)


# -- the same bits at any number of ranks


def tree_worker(rank: int, ranks: int, width: int, length: int, blocks: list[int], turns: int) -> list[list[float]]:
    """Seconds of steps with sums in the backend's order, and with each number of blocks."""
    ways: list[dict[str, Any]] = [{}, *({"reduce": "tree", "blocks": each} for each in blocks)]
    steps = [ours(ranks, width, tokens_of(0, length), sums="tree", **way) for way in ways]
    return [[seconds for seconds, _ in each] for each in in_turns(steps, turns)]


def print_tree(width: int, length: int, blocks: list[int], turns: int) -> None:
    rows = []
    for ranks in (1, 2):
        plain, *trees = run_ranks(tree_worker, ranks, ranks, width, length, blocks, turns)
        for count, each in zip(blocks, trees, strict=True):
            times = [stat([1e3 * one for one in column]).text() for column in (plain, each)]
            rows.append([str(ranks), str(count), *times, paired(each, plain).text(3)])
    print(table(["ranks", "blocks", '"sum", ms', '"tree", ms', "tree / sum"], rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("times", "tree"), default=["times", "tree"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=128, help=f"of {ROWS} rows")
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--turns", type=int, default=20, help="timed steps of each kind, after one that is not")
    args = parser.parse_args()
    print(machine_line(), flush=True)
    if "times" in args.parts:
        print_times(2, args.width, args.length, args.turns)
    if "tree" in args.parts:
        print_tree(args.width, args.length, args.blocks, args.turns)


if __name__ == "__main__":
    main()
