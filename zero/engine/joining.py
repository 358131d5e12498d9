"""Joining the process group of the ranks that were started together, by whatever launcher."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zero.core.torch_private import nccl_options
from zero.core.world import local_device
from zero.engine.meeting import met, own_store
from zero.launch.launched import PORT, Launched, launched
from zero.log import rank_zero

# How often this process has met the others where nobody had chosen a port, and the port of the last time. It stands in
# the environment, as the port does.
_MET = "ZERO_MET"


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group of the ranks that were started together; adopt the one that exists; else stay alone.

    The ranks may be those of `zero run`, torchrun, srun, or mpirun of Open MPI, MPICH or Intel MPI; see
    `zero.launch.launched`. Afterwards RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    are set. A world of one process needs no process group. The signature is that of DeepSpeed.

    dist_backend: defaults to NCCL, with gloo for the hosts, where every local rank has a GPU of its own; else gloo.
    auto_mpi_discovery: False to look at the variables of torchrun only. distributed_port: for ranks of mpirun on
    several hosts where MASTER_PORT is not set. timeout: for the ranks to come, and of the group; None: 10 minutes.
    init_method, rank, world_size: as of `torch.distributed.init_process_group`, for a process that no launcher has
    started.
    dist_init_required: False where the caller has made the group. verbose, config: not used.
    Raises ValueError when the environment is only half set, and for NCCL without a GPU; RuntimeError when there should
    be a group and is none.
    """
    if dist.is_initialized():
        _adopt(auto_mpi_discovery)
        return
    timeout = timedelta(minutes=10) if timeout is None else timeout
    if dist_init_required is False:
        raise RuntimeError(
            "init_distributed(dist_init_required=False): there is no process group; call "
            "torch.distributed.init_process_group first, or leave the argument out"
        )
    explicit = {"init_method": init_method, "rank": rank, "world_size": world_size}
    if init_method is not None or rank >= 0 or world_size >= 0:
        _join(dist_backend, timeout, **explicit)
        return
    terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    environment, meetings = _before_meetings()
    found = launched(environment, distributed_port, auto_mpi_discovery, terminal)
    if found is None:
        return
    if found.port is not None:
        _complete(found, found.port)
        _join(dist_backend, timeout)
        return
    # A meeting of its own for each group: a rank that is ahead must not find the store of the group before.
    with met(found.job, meetings, found.rank, found.world_size, timeout) as port:
        _complete(found, port)
        os.environ.update({"MASTER_PORT": str(port), _MET: f"{meetings + 1}:{port}"})
        _join(dist_backend, timeout)


def refuse_alone(port: int = PORT) -> None:
    """Raise RuntimeError where a launcher has started other ranks and this one has no process group to meet them in."""
    found = None if dist.is_initialized() else launched(os.environ, port)
    if found is not None and found.world_size > 1:
        raise RuntimeError(
            f"dist_init_required=False: this is rank {found.rank} of {found.world_size} by its environment, but there "
            "is no process group, so each rank would train by itself; call torch.distributed.init_process_group first, "
            "leave the argument out, or set WORLD_SIZE=1 to train with this process alone"
        )


def refuse_nccl(backend: str | None) -> None:
    """Raise ValueError where NCCL is asked for and this process sees no GPU."""
    if "nccl" in (backend or "") and local_device().type == "cpu":
        raise ValueError(
            f"init_distributed(dist_backend={backend!r}): NCCL wants a GPU for each rank, and torch sees none here; "
            "leave the argument out, which takes NCCL where there are GPUs and else gloo, or say 'gloo'"
        )


def _before_meetings() -> tuple[dict[str, str], int]:
    """The environment without the port of an earlier group of this process, and how many such groups it has met for."""
    environment = dict(os.environ)
    count, _, port = environment.get(_MET, "").partition(":")
    if not count.isdecimal() or environment.get("MASTER_PORT") != port:
        return environment, 0
    del environment["MASTER_PORT"]
    return environment, int(count)


def _adopt(discover: bool) -> None:
    """Say in the environment which rank this is where only the launcher's own variables do, for `local_device`."""
    found = None
    with contextlib.suppress(ValueError):  # what does not fit has not kept the group from being made
        found = launched(os.environ, discover=discover)
    if found is not None and (found.rank, found.world_size) == (dist.get_rank(), dist.get_world_size()):
        _complete(found, found.port)


def _complete(found: Launched, port: int | None) -> None:
    for name, value in found.variables(port).items():
        os.environ.setdefault(name, value)


def _join(backend: str | None, timeout: timedelta, **explicit: Any) -> None:
    device = local_device()
    refuse_nccl(backend)
    if backend is None:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        own_gpu = device.type == "cuda" and ranks_here <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"  # the hosts speak past their GPUs
        if device.type == "cuda" and not own_gpu:
            rank_zero(
                logging.INFO,
                "%d ranks share %d GPU(s): they talk over gloo, since NCCL wants a GPU for each",
                ranks_here,
                torch.cuda.device_count(),
            )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kept = None if explicit else own_store(os.environ, timeout)
    if "nccl" in backend and device.type == "cuda":
        explicit |= {"device_id": device, "pg_options": nccl_options(timeout)}
    dist.init_process_group(backend, timeout=timeout, **explicit)
    del kept
