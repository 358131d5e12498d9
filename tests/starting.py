"""A script that each launcher starts: it trains and prints one line. See test_starts.py.

zero run --num_gpus 2 starting.py train
mpirun -n 2 python starting.py again | meet | fail FOLDER
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from pathlib import Path

gc.disable()  # for the imports: nothing of them is garbage, and to look for some takes a third of them
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import zero  # noqa: E402

STEPS = 3
WHO = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def main(what: str, *args: str) -> None:
    """Do one of the four: train; train, then meet again and again; only that; or fail."""
    torch.set_num_threads(1)
    zero.init_distributed()
    if what == "fail":
        fail(Path(*args))
    losses = trained() if what != "meet" else None
    who, port = [os.environ.get(name) for name in WHO], os.environ["MASTER_PORT"]
    total = together_again() if what != "train" else None
    sys.stdout.write(f"{' '.join(map(str, who))}|{losses!r}|{port}|{total}\n")
    dist.destroy_process_group()


def with_imports() -> None:
    """All is there that is needed: from now on what is garbage is of this program."""
    zero.initialize  # noqa: B018 - which imports the engine
    gc.freeze()
    gc.enable()


def trained() -> list[float]:
    """The losses of a few steps under stage 3."""
    from scenario import run

    with_imports()
    return run("net", 3, STEPS).losses


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

    with_imports()
    (folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2))
    for step in itertools.count():
        if step == 2 and dist.get_rank() == 1:
            raise ValueError("of rank 1")
        engine.backward(engine(*batch(step, 2)))
        engine.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
