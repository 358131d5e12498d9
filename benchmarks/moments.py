"""Do moments in bf16 or 8 bit train as well as in fp32? Validation losses of examples/gpt, by format and seed.

    python benchmarks/moments.py --ranks 2 --steps 300

The same weights, data and schedule for each format; a seed gives other weights and other data. Nine runs, one after the
other, in one set of ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import machine_line, paired, run_ranks, stat, table
from torch import Tensor

import zero
from zero.data import RepeatingLoader

sys.path.append(str(Path(__file__).parents[1] / "examples" / "gpt"))
from model import GPT, Shape
from text import Split, Windows, read_split

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt"
FORMATS = ("fp32", "bf16", "8bit")
VALIDATION_WINDOWS = 512
TOLERANCE = 0.005  # of the validation loss with fp32 moments; a lower loss is chance, and no harm


class Result(NamedTuple):
    """Of one run: nats per byte, bytes of optimizer state per parameter of one replica, seconds."""

    train: float
    validation: float
    nbytes: float
    seconds: float


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train the example GPT with moments in three formats")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each format")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="what computes")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    for name in ("width", "layers", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape(), name))
    args = parser.parse_args()
    if min(args.ranks, args.steps, args.seeds) < 1:
        parser.error("--ranks, --steps and --seeds want at least 1")
    return args


def config(args: argparse.Namespace, moments: str) -> dict[str, Any]:
    """The example's JSON for ZeRO-2, with a schedule of this length, and the moments."""
    made = json.loads((EXAMPLE / "zero2.json").read_text())
    made["scheduler"]["params"] |= {"total_num_steps": args.steps, "warmup_num_steps": max(1, args.steps // 10)}
    made["optimizer"]["params"]["zero"] = {"moments": moments}
    return made | {"bf16": {"enabled": args.dtype == "bf16"}, "steps_per_print": 10**9}


def train(args: argparse.Namespace, text: Split, moments: str, seed: int) -> Result:
    """One run; the result is the same on all ranks."""
    begin = time.perf_counter()
    shape = Shape(args.width, args.layers, args.heads, args.context)
    dataset = Windows(text.train, shape.context, text.train.numel() // shape.context, seed)
    torch.manual_seed(seed)
    engine, _, loader, _ = zero.initialize(model=GPT(shape), config=config(args, moments), training_data=dataset)
    batches, losses = RepeatingLoader(loader), []
    for _ in range(args.steps):
        x, y = next(batches)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    last = mean(torch.stack(losses[-max(1, args.steps // 10) :]).double().mean())
    held = torch.tensor(float(engine.state_nbytes().optimizer))
    dist.all_reduce(held)
    numel = sum(param.numel() for param in engine.module.parameters())
    found = validate(engine, text, shape.context)
    engine.destroy()
    return Result(last, found, held.item() / numel, time.perf_counter() - begin)


def mean(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def validate(engine: Any, text: Split, context: int) -> float:
    """Mean loss over fixed windows in nats per byte; each rank takes an equal part of them."""
    windows, size = Windows(text.validation, context, VALIDATION_WINDOWS, seed=None), 16
    world, rank = dist.get_world_size(), dist.get_rank()
    engine.eval()
    losses = []
    for begin in range(rank * size, VALIDATION_WINDOWS - VALIDATION_WINDOWS % (world * size), world * size):
        x, y = (torch.stack(part) for part in zip(*(windows[begin + i] for i in range(size)), strict=True))
        losses.append(engine(x, y))
    return mean(torch.stack(losses).double().mean())


def worker(rank: int, args: argparse.Namespace) -> dict[tuple[str, int], Result]:
    """All runs on one rank. Formats take turns within a seed, so that a run that is cut short shows pairs."""
    text, results = read_split(), {}
    for seed, moments in product(range(args.seeds), args.formats):
        result = train(args, text, moments, seed)
        results[moments, seed] = result
        if rank == 0:
            print(f"seed {seed}, {moments}: {result.validation:.4f} in {result.seconds:.0f} s", file=sys.stderr)
    return results


def report(results: dict[tuple[str, int], Result], formats: list[str], seeds: int) -> str:
    """One row per format."""
    header = [
        "moments",
        *(f"validation, seed {seed}" for seed in range(seeds)),
        "mean",
        "ratio to fp32, by seed",
        f"<= {1 + TOLERANCE}",
        "last training losses",
        "optimizer B/param",
    ]
    rows = []
    for moments in formats:
        mine = [results[moments, seed] for seed in range(seeds)]
        losses = [result.validation for result in mine]
        ratio, met = "-", "-"
        if "fp32" in formats and moments != "fp32":
            pairs = paired(losses, [results["fp32", seed].validation for seed in range(seeds)])
            ratio, met = pairs.text(4), "yes" if pairs.median <= 1 + TOLERANCE else "NO"
        cells = [
            moments,
            *(f"{loss:.4f}" for loss in losses),
            f"{sum(losses) / seeds:.4f}",
            ratio,
            met,
            stat([result.train for result in mine]).text(4),
            f"{mine[0].nbytes:.2f}",
        ]
        rows.append(cells)
    return table(header, rows)


def main() -> None:
    args = parse()
    print(machine_line())
    results = run_ranks(worker, args.ranks, args)
    print(
        f"\nGPT of examples/gpt (width {args.width}, {args.layers} layers), {args.steps} steps of ZeRO-2 on "
        f"{args.ranks} gloo ranks of 1 thread, {args.dtype}; nats per byte, median [min-max]\n"
    )
    print(report(results, args.formats, args.seeds))


if __name__ == "__main__":
    main()
