"""Each collective of torch once, on ranks that `zero doctor` starts as `-m zero.tools.report.collectives DIR BACKEND`.

Each rank writes what went wrong to a file in DIR that is called by its number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from zero.core.comm import local_device

TIMEOUT = timedelta(seconds=60)


def run(folder: Path, backend: str) -> bool:
    """Join the ranks that were started together, run each collective and note what is not right; whether all is."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = local_device() if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=device if backend == "nccl" else None)
    wrong = problems(rank, world, device)
    (folder / str(rank)).write_text("\n".join(wrong), encoding="utf-8")
    dist.destroy_process_group()
    return not wrong


def problems(rank: int, world: int, device: torch.device) -> list[str]:
    """What of each collective is not as it should be; it ends at an error, as other ranks may still be in that one."""
    wrong, done = [], "the first"
    try:
        for name, found, wanted in collectives(rank, world, device):
            done = f"what comes after {name}"
            if found.tolist() != wanted:
                wrong.append(f"{name}: got {found.tolist()}, wanted {wanted}")
    except (RuntimeError, ValueError) as error:
        wrong.append(f"{done}: {str(error).splitlines()[0]}")
    return wrong


def collectives(rank: int, world: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor, list[float]]]:
    """Run each: its name, what it gives on this rank, and what it should have given."""

    def own(numel: int = 1) -> torch.Tensor:
        return torch.full((numel,), rank + 1.0, device=device)

    every, before, after = [index + 1.0 for index in range(world)], (rank - 1) % world, (rank + 1) % world
    dist.barrier()
    yield "barrier", own(), [rank + 1.0]
    dist.broadcast(found := own(), world - 1)
    yield "broadcast", found, [float(world)]
    dist.all_reduce(found := own())
    yield "all-reduce", found, [sum(every)]
    dist.all_gather_into_tensor(found := own(world), own())
    yield "all-gather", found, every
    dist.reduce_scatter_tensor(found := own(), own(world))
    yield "reduce-scatter", found, [sum(every)]
    dist.all_to_all_single(found := own(world), own(world))
    yield "all-to-all", found, every
    if world > 1:
        ways = [dist.P2POp(dist.isend, own(), after), dist.P2POp(dist.irecv, found := own(), before)]
        for work in dist.batch_isend_irecv(ways):
            work.wait()
        yield "send and receive", found, [before + 1.0]


if __name__ == "__main__":
    sys.exit(0 if run(Path(sys.argv[1]), sys.argv[2]) else 1)
