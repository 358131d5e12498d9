"""Each collective of torch once, on ranks that `zero doctor` starts as `-m zero.tools.report.collectives DIR BACKEND`.

Each rank writes what went wrong to a file in DIR that is called by its number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero.core.world import local_device

TIMEOUT = timedelta(seconds=60)


def run(folder: Path, backend: str) -> bool:
    """Join the ranks that were started together, run each collective and note what is not right; whether all is."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = local_device() if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=device if backend == "nccl" else None)
    wrong = []
    for name, collective in COLLECTIVES.items():
        try:
            found, wanted = collective(rank, world, device)
        except (RuntimeError, ValueError) as error:
            wrong.append(f"{name}: {str(error).splitlines()[0]}")
            break  # other ranks may still be in it
        if found.tolist() != wanted:
            wrong.append(f"{name}: got {found.tolist()}, wanted {wanted}")
    (folder / str(rank)).write_text("\n".join(wrong), encoding="utf-8")
    dist.destroy_process_group()
    return not wrong


def _filled(rank: int, device: torch.device, numel: int = 1) -> torch.Tensor:
    return torch.full((numel,), rank + 1.0, device=device)


def _called(collective: Callable[..., Any], values: torch.Tensor, *more: Any) -> torch.Tensor:
    collective(values, *more)
    return values


def _sent_on(rank: int, world: int, device: torch.device) -> torch.Tensor:
    values = _filled(rank, device)
    if world == 1:
        return values
    ways = [(dist.isend, values, (rank + 1) % world), (dist.irecv, torch.empty(1, device=device), (rank - 1) % world)]
    for work in dist.batch_isend_irecv([dist.P2POp(*way) for way in ways]):
        work.wait()
    return ways[1][1]


def _sum(world: int) -> list[float]:
    return [world * (world + 1) / 2]


Collective = Callable[[int, int, torch.device], tuple[torch.Tensor, list[float]]]
COLLECTIVES: dict[str, Collective] = {
    "barrier": lambda rank, world, on: (_called(lambda _: dist.barrier(), _filled(rank, on)), [rank + 1.0]),
    "broadcast": lambda rank, world, on: (_called(dist.broadcast, _filled(rank, on), world - 1), [float(world)]),
    "all-reduce": lambda rank, world, on: (_called(dist.all_reduce, _filled(rank, on)), _sum(world)),
    "all-gather": lambda rank, world, on: (
        _called(dist.all_gather_into_tensor, torch.empty(world, device=on), _filled(rank, on)),
        [index + 1.0 for index in range(world)],
    ),
    "reduce-scatter": lambda rank, world, on: (
        _called(dist.reduce_scatter_tensor, torch.empty(1, device=on), _filled(rank, on, world)),
        _sum(world),
    ),
    "all-to-all": lambda rank, world, on: (
        _called(dist.all_to_all_single, torch.empty(world, device=on), _filled(rank, on, world)),
        [index + 1.0 for index in range(world)],
    ),
    "send and receive": lambda rank, world, on: (_sent_on(rank, world, on), [(rank - 1) % world + 1.0]),
}
"""By name: what a collective gives on this rank, and what it should have given."""


if __name__ == "__main__":
    sys.exit(0 if run(Path(sys.argv[1]), sys.argv[2]) else 1)
