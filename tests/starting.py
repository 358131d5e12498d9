"""A script that each launcher starts: it trains and prints one line. See test_starts.py.

zero run --num_gpus 2 starting.py train
mpirun -n 2 python starting.py again | fail FOLDER
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import zero

STEPS = 3
WHO = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def main(what: str, *args: str) -> None:
    """Do one of the three."""
    torch.set_num_threads(1)
    zero.init_distributed()
    if what == "fail":
        fail(Path(*args))
    losses = trained()
    who, port = [os.environ.get(name) for name in WHO], os.environ["MASTER_PORT"]
    total = together_again() if what == "again" else None
    sys.stdout.write(f"{' '.join(map(str, who))}|{losses!r}|{port}|{total}\n")
    dist.destroy_process_group()


def trained() -> list[float]:
    """The losses of a few steps under stage 3."""
    from models import config, make_net, train

    return train(make_net(), dist.get_world_size(), config(3, dist.get_world_size()), STEPS)["losses"]


def together_again() -> int:
    """What five further groups one after the other add up to; rank 0 comes late, the others are ahead."""
    total = 0
    for turn in range(5):
        if dist.get_rank() == 0:
            time.sleep(0.05)
        dist.destroy_process_group()
        zero.init_distributed()
        number = torch.tensor(10**turn * (dist.get_rank() + 1))
        dist.all_reduce(number)
        total += int(number)
    return total


def fail(folder: Path) -> None:
    """Rank 1 raises while rank 0 goes on with training, in which it would wait for rank 1 for ever."""
    from models import batch, config, make_net

    (folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2))
    for step in itertools.count():
        if step == 2 and dist.get_rank() == 1:
            raise ValueError("of rank 1")
        engine.backward(engine(*batch(step, 2)))
        engine.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
