"""Trains and saves; agents of torchrun start it in test_elastic_agents.py, and `zero run` beside them.

    torchrun ... elastic_rank.py FOLDER STEPS [STEP ...]

It saves behind the last of the steps, behind those that are named, and where the ranks are to end for others to join.
In FOLDER: `checkpoints`; `begun`, a line "step size rank pid" for each process that could load; `losses`, a line
"step loss"; `hold-STEP`, where it is there, for ranks to wait behind that step until it is gone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from recovering import append, config, data, model

import zero

# Of one, two and three ranks.
VALUES = {**config(2, False), "train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "zero": {"timeout": 60}}


def main() -> None:
    folder, (steps, *saved) = Path(sys.argv[1]), map(int, sys.argv[2:])
    torch.set_num_threads(1)
    zero.seed_everything(1)
    engine, *_ = zero.initialize(model=model(), config=VALUES, training_data=data())
    engine.load_checkpoint(folder / "checkpoints")
    engine.save_on_signal("SIGTERM", folder / "checkpoints")
    where = engine.global_steps, engine.world_size, engine.global_rank
    append(folder / "begun", " ".join(map(str, (*where, os.getpid()))))
    batches = zero.RepeatingLoader(engine.training_dataloader)
    while engine.global_steps < steps:
        for _ in range(engine.gradient_accumulation_steps()):
            (x,) = next(batches)
            loss = (engine(x) - x.sin()).square().mean()
            engine.backward(loss)
            engine.step()
        total = engine.reduce(loss.item())
        if engine.global_steps in (steps, *saved):
            engine.save_checkpoint(folder / "checkpoints")
        if engine.global_rank == 0:
            append(folder / "losses", f"{engine.global_steps} {total.hex()}")
        while (folder / f"hold-{engine.global_steps}").exists():
            time.sleep(0.05)
    engine.destroy()


if __name__ == "__main__":
    main()
