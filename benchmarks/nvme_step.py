"""How near a step with its state on a drive comes to the slower of drive and update.

    python benchmarks/nvme_step.py --folder /mnt/nvme

Three things take turns on one rank: the updates of all units with state in host memory, the drive alone (every record
is read and written, nothing is computed), and the updates with state on the drive. The last should take the time of the
slower of the first two, and that of the first and the last unit, which nothing overlaps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from measure import machine_line
from torch import nn

import zero
from zero.engine.engine import Engine


class Block(nn.Module):
    """A unit of `8 x width^2` parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One residual step; the work is in the update."""
        return x + self.down(torch.tanh(self.up(x)))


def make_engine(args: argparse.Namespace, device: str) -> Engine:
    """Stage 2 on one rank, with optimizer state on `device`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
    offload = {"device": device, "nvme_path": args.folder, "buffer_count": args.buffers}
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
        "aio": {"queue_depth": args.depth},
        "steps_per_print": float("inf"),
    }
    return zero.initialize(model=model, config=config)[0]


def update_seconds(engine: Engine, width: int) -> float:
    """Of `step()` until every unit is updated; writes may still be on their way."""
    engine.backward(engine(torch.ones(1, width)).square().mean())
    begin = time.perf_counter()
    engine.step()
    engine.optimizer.settle()
    return time.perf_counter() - begin


def landed(engine: Engine) -> None:
    """Wait for the writes, too."""
    pool = engine._sharded.offload.swap_files["optimizer"].pool
    with pool.lock:
        for buffer in list(pool.buffers):
            pool.wait(buffer)


def drive_seconds(engine: Engine) -> float:
    """Of reading and writing every record in the order of the updates, computing nothing."""
    stores: list[Any] = [unit.shard.placement.state_store for unit in engine._sharded.trained]
    begin = time.perf_counter()
    for index, store in enumerate(stores):
        for later in stores[index:]:
            if not later.fetch():
                break
        store.acquire()
        store.write_back(True)
    landed(engine)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print one line for each of the three, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".")
    for name, default in {"width": 1024, "layers": 12, "buffers": 4, "depth": 16, "turns": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print(machine_line())
    memory, drive = make_engine(args, "cpu"), make_engine(args, "nvme")
    update_seconds(memory, args.width), update_seconds(drive, args.width)
    rows = []
    for _ in range(args.turns):
        landed(drive)
        both = update_seconds(drive, args.width)
        landed(drive)
        rows.append((update_seconds(memory, args.width), drive_seconds(drive), both))
    for name, column in zip(
        ("update alone", "drive alone", "state on the drive"), zip(*rows, strict=True), strict=True
    ):
        print(f"{name:<20} {statistics.median(column):.3f} s [{min(column):.3f}-{max(column):.3f}]")
    ratios = [both / max(update, alone) for update, alone, both in rows]
    nbytes = drive.host_nbytes().files
    print(f"{nbytes / 2**20:,.0f} MiB in files; step / max(update, drive): {statistics.median(ratios):.2f}")
    memory.destroy(), drive.destroy()


if __name__ == "__main__":
    main()
