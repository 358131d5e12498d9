"""A rank of a job of Slurm in tests: it trains at stage 3, and goes on behind its newest checkpoint.

    python slurm_rank.py FOLDER STEPS [SECONDS [SIGNALS [EVERY]]]

SECONDS: that each step waits. SIGNALS: at which it saves and ends. EVERY: steps from one save to the next, which no
signal asks for; 0: none. In FOLDER: `checkpoints`; `losses`, a line "step loss" for each step; `begun`, a line "step
rank pid node" of each rank at each start; `hash`, of the weights at the end.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from recovering import append, config, data, model, train_step

import zero
from zero.data import RepeatingLoader


def main(folder: Path, steps: int, seconds: float = 0.0, signals: str = "", every: int = 0) -> None:
    torch.set_num_threads(1)
    engine, *_ = zero.initialize(model=model(), config=config(3, background=False), training_data=data())
    checkpoints = folder / "checkpoints"
    if signals:
        engine.save_on_signal(signals.split(","), checkpoints)
    engine.load_checkpoint(checkpoints)
    node = os.environ.get("SLURMD_NODENAME", "")
    append(folder / "begun", f"{engine.global_steps} {engine.global_rank} {os.getpid()} {node}")
    batches = RepeatingLoader(engine.training_dataloader)
    while engine.global_steps < steps:
        loss = train_step(engine, batches)
        if engine.global_rank == 0:
            append(folder / "losses", f"{engine.global_steps} {loss.hex()}")
        if every and engine.global_steps % every == 0:
            engine.save_checkpoint(checkpoints)
        time.sleep(seconds)
    weights = engine.module_state_dict()
    if engine.global_rank == 0:
        append(folder / "hash", digest(weights))
    engine.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Of all values and their names."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(name.encode() + value.cpu().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:4]), *sys.argv[4:5], *map(int, sys.argv[5:6]))
