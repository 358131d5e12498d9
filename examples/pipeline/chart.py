"""Draw how long a residual network trains in one process, in two pieces, and in two pieces that work at once.

    zero run --num_gpus 2 examples/pipeline/chart.py

One batch of 120 pictures, cut into micro-batches of several sizes. Only the JSON changes: one process has no section
`pipeline`; in two pieces with a split size of 120 each waits for the other; smaller ones let both work at once, until
what each micro-batch costs by itself weighs more. The times are in times.json, the picture in times.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resnet import ResNet
from torch.nn import functional as F

import zero

BATCH = 120
SPLIT_SIZES = (1, 2, 5, 10, 20, 40, 60, 120)
ALONE = "one process"


def config_of(split_size: int | None) -> dict[str, Any]:
    """Return the JSON of two pieces with this split size, or of one process."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "log_level": "error",
    }
    if split_size is not None:
        config["pipeline"] = {"stages": 2, "split_size": split_size, "stage_map": {"layer3": 1}}
    return config


def measure(split_size: int | None, steps: int, width: int, side: int) -> list[float]:
    """Return the seconds of each of some training steps, after one that is not counted."""
    torch.manual_seed(0)
    engine, *_ = zero.initialize(
        model=ResNet(width, (2, 2, 2, 2)), config=config_of(split_size), loss_fn=F.cross_entropy
    )
    batch = torch.randn(BATCH, 3, side, side), torch.randint(5, (BATCH,))
    seconds = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        engine.train_batch(iter([batch])).item()  # the loss is there when all ranks have stepped
        seconds.append(time.perf_counter() - begin)
    engine.destroy()
    return seconds[1:]


def measure_alone(args: argparse.Namespace) -> list[float]:
    """Return those of one process, which this rank starts, as no launcher would."""
    left = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ZERO_", "SLURM_", "OMPI_")
    alone = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    sizes = ["--steps", str(args.steps), "--width", str(args.width), "--side", str(args.side)]
    words = [sys.executable, __file__, "--alone", *sizes]
    done = subprocess.run(words, env=alone, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def draw(path: Path, times: dict[str, float]) -> None:
    """Draw a bar for each way, seconds of a step."""
    import matplotlib

    matplotlib.use("Agg")  # before pyplot: there may be no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    colors = ["tab:gray", "tab:orange", *["tab:blue"] * (len(times) - 2)]
    axes.bar([*times], [*times.values()], color=colors)
    axes.set(ylabel=f"seconds for a batch of {BATCH}", ylim=(0, None))
    axes.tick_params("x", rotation=30)
    axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Measure and draw; return the median seconds of a step, by way."""
    parser = argparse.ArgumentParser(description="draw the time of a step in pieces with the zero engine")
    parser.add_argument("--out", default=".", help="where times.json and times.png are written")
    parser.add_argument("--steps", type=int, default=2, help="timed of each way, after one that is not")
    parser.add_argument("--split-sizes", type=int, nargs="+", default=SPLIT_SIZES)
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--side", type=int, default=48, help="of a picture, in points")
    parser.add_argument("--alone", action="store_true", help="measure one process, and print its seconds")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # a rank has one core, and so has one process
    if args.alone:
        print(json.dumps(measure(None, args.steps, args.width, args.side)))
        return {}
    zero.init_distributed()
    if not dist.is_initialized() or dist.get_world_size() != 2:
        parser.error("start it on two ranks: zero run --num_gpus 2 examples/pipeline/chart.py")
    found = {ALONE: measure_alone(args) if dist.get_rank() == 0 else [0.0]}
    dist.barrier()
    ways = {"two pieces": BATCH} | {f"split size {size}": size for size in args.split_sizes}
    for name, size in ways.items():
        found[name] = measure(size, args.steps, args.width, args.side)
    times = {name: statistics.median(seconds) for name, seconds in found.items()}
    if dist.get_rank() == 0:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "times.json").write_text(json.dumps({"seconds": times, "all": found}, indent=2) + "\n")
        draw(out / "times.png", times)
        for name, seconds in times.items():
            print(f"{name}: {seconds:.3f} s, {seconds / times[ALONE]:.2f} of one process")
    return times


if __name__ == "__main__":
    main()
