"""Each collective of torch once, on ranks that `zero doctor` starts as `-m zero.tools.report.collectives BACKEND DIR`.

Each rank writes what went wrong to a file in DIR that is called by its number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from zero.core.world import local_device

TIMEOUT = timedelta(seconds=60)


def run(backend: str, folder: Path) -> bool:
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


Result = tuple[torch.Tensor, list[float]]


def _own(rank: int, device: torch.device, numel: int = 1) -> torch.Tensor:
    return torch.full((numel,), rank + 1.0, device=device)


def _broadcast(rank: int, world: int, device: torch.device) -> Result:
    values = _own(rank, device)
    dist.broadcast(values, src=world - 1)
    return values, [float(world)]


def _all_reduce(rank: int, world: int, device: torch.device) -> Result:
    values = _own(rank, device)
    dist.all_reduce(values)
    return values, [world * (world + 1) / 2]


def _all_gather(rank: int, world: int, device: torch.device) -> Result:
    values = torch.empty(world, device=device)
    dist.all_gather_into_tensor(values, _own(rank, device))
    return values, [index + 1.0 for index in range(world)]


def _reduce_scatter(rank: int, world: int, device: torch.device) -> Result:
    values = torch.empty(1, device=device)
    dist.reduce_scatter_tensor(values, _own(rank, device, world))
    return values, [world * (world + 1) / 2]


def _all_to_all(rank: int, world: int, device: torch.device) -> Result:
    values = torch.empty(world, device=device)
    dist.all_to_all_single(values, _own(rank, device, world))
    return values, [index + 1.0 for index in range(world)]


def _send_and_receive(rank: int, world: int, device: torch.device) -> Result:
    values, before = _own(rank, device), (rank - 1) % world
    if world > 1:
        sent, values = values, torch.empty(1, device=device)
        ways = [(dist.isend, sent, (rank + 1) % world), (dist.irecv, values, before)]
        for work in dist.batch_isend_irecv([dist.P2POp(*way) for way in ways]):
            work.wait()
    return values, [before + 1.0]


def _barrier(rank: int, world: int, device: torch.device) -> Result:
    dist.barrier()
    return _own(rank, device), [rank + 1.0]


COLLECTIVES: dict[str, Callable[[int, int, torch.device], Result]] = {
    "barrier": _barrier,
    "broadcast": _broadcast,
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "send and receive": _send_and_receive,
}


if __name__ == "__main__":
    sys.exit(0 if run(sys.argv[1], Path(sys.argv[2])) else 1)
