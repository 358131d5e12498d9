"""A training run that saves every step and goes on behind its newest checkpoint; `test_recovery.py` kills it.

It has what a checkpoint has to bring back: a place in shuffled data, dropout, and a schedule.

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
from torch.utils.data import TensorDataset

import zero
from zero.data import RepeatingLoader


class Run(NamedTuple):
    """What a run is asked to do; `save` false: train only, from the beginning. background: save asynchronously."""

    folder: Path
    steps: int
    stage: int
    tag: str | None = None
    save: bool = True
    background: bool = False
    attempt: int = 0


def append(path: Path, line: str) -> None:
    """One line, on the drive when this returns."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, f"{line}\n".encode())
    os.fsync(handle)
    os.close(handle)


def config(stage: int, background: bool) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 30, "warmup_max_lr": 3e-3}},
        "zero_optimization": {"stage": stage},
        # The same bits, whether two ranks compute the two micro-batches of a step or one.
        "zero": {"reduce": "tree", "checkpoint": {"async": background, "keep": 3}},
    }


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 256), nn.Linear(256, 64))


def data() -> TensorDataset:
    """Twelve steps, so that most runs go through it a few times, each time in another order."""
    return TensorDataset(torch.randn(96, 64, generator=torch.Generator().manual_seed(4)))


def train_step(engine: Any, batches: RepeatingLoader) -> float:
    """One optimizer step; the mean loss of the global batch, the same bits at one rank and at two."""
    count = engine.gradient_accumulation_steps()
    losses = torch.zeros(count * engine.world_size, dtype=torch.float64)
    for turn in range(count):
        (x,) = next(batches)
        loss = (engine(x) - x.sin()).square().mean()
        engine.backward(loss)
        losses[turn * engine.world_size + engine.global_rank] = loss.item()
        engine.step()
    if dist.is_initialized():
        dist.all_reduce(losses)  # of each place all ranks but one add zero
    return (losses[0] + losses[1]).item() / 2


def go(run: Run) -> None:
    """Load what there is, and train to the end; for each rank."""
    engine, *_ = zero.initialize(model=model(), config=config(run.stage, run.background), training_data=data())
    first = engine.global_rank == 0
    checkpoints = run.folder / "checkpoints"
    if run.save:
        engine.load_checkpoint(checkpoints)
    if first:
        append(run.folder / "begun", f"{run.attempt} {engine.global_steps}")
    batches = RepeatingLoader(engine.training_dataloader)
    while engine.global_steps < run.steps:
        loss = train_step(engine, batches)
        step = engine.global_steps
        if first:
            append(run.folder / "losses", f"{run.attempt} {step} {loss.hex()}")
        if run.save:
            engine.save_checkpoint(checkpoints, tag=run.tag)
            # A save waits for the one before it, which runs beside the step if it is asynchronous.
            if first and (whole := step - run.background):
                append(run.folder / "saved", str(whole))
    engine.destroy()
    if run.save and first:
        append(run.folder / "saved", str(run.steps))


def main() -> None:
    """As one rank of `zero run`, with saves that wait in even attempts and asynchronous ones in odd attempts."""
    folder, steps, stage = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    append(folder / f"pids-{attempt}", f"{os.environ['RANK']} {os.getpid()}")
    torch.set_num_threads(1)
    go(Run(folder, steps, stage, background=attempt % 2 == 1, attempt=attempt))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
