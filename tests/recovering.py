"""A training run that saves every step and goes on behind its newest checkpoint; `test_recovery.py` kills it.

    zero run --num_gpus 2 --max_restarts 3 recovering.py FOLDER STEPS STAGE

In FOLDER: `checkpoints`; `losses`, a line "attempt step loss" for each step; `begun`, a line "attempt step" for each
attempt that could load; `saved`, the step of each save that was reported; `pids-ATTEMPT`, a line "rank pid" per rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import zero


class Run(NamedTuple):
    """What a run is asked to do; `save` false: train only, from the beginning."""

    folder: Path
    steps: int
    stage: int
    tag: str | None = None
    save: bool = True
    attempt: int = 0


def append(path: Path, line: str) -> None:
    """One line, on the drive when this returns."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, f"{line}\n".encode())
    os.fsync(handle)
    os.close(handle)


def config(stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        # Losses that are compared are those of two micro-batches, whoever computes them.
        "zero": {"reduce": "tree"},
    }


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))


def micro_batch(step: int, index: int) -> torch.Tensor:
    """Micro-batch `index` of those that all ranks together compute for a step."""
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * step + index))


def train_step(engine: Any) -> float:
    """One optimizer step; the mean loss of the global batch, the same bits at one rank and at two."""
    count = engine.gradient_accumulation_steps()
    losses = torch.zeros(count * engine.world_size, dtype=torch.float64)
    for _ in range(count):
        at = engine.micro_steps % count * engine.world_size + engine.global_rank
        x = micro_batch(engine.global_steps, at)
        loss = (engine(x) - x.sin()).square().mean()
        engine.backward(loss)
        losses[at] = loss.item()
        engine.step()
    if dist.is_initialized():
        dist.all_reduce(losses)  # of each place all ranks but one add zero
    return (losses[0] + losses[1]).item() / 2


def go(run: Run) -> None:
    """Load what there is, and train to the end; for each rank."""
    engine, *_ = zero.initialize(model=model(), config=config(run.stage))
    first = engine.global_rank == 0
    checkpoints = run.folder / "checkpoints"
    if run.save:
        engine.load_checkpoint(checkpoints)
    if first:
        append(run.folder / "begun", f"{run.attempt} {engine.global_steps}")
    while engine.global_steps < run.steps:
        loss = train_step(engine)
        step = engine.global_steps
        if first:
            append(run.folder / "losses", f"{run.attempt} {step} {loss.hex()}")
        if run.save:
            engine.save_checkpoint(checkpoints, tag=run.tag)
            if first:
                append(run.folder / "saved", str(step))
    engine.destroy()


def main() -> None:
    folder, steps, stage = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    append(folder / f"pids-{attempt}", f"{os.environ['RANK']} {os.getpid()}")
    torch.set_num_threads(1)
    go(Run(folder, steps, stage, attempt=attempt))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
