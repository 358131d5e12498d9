"""`torch.distributed` by the name `deepspeed.comm`, with DeepSpeed's `init_distributed`."""

import sys
from datetime import timedelta
from typing import Any

import torch.distributed as _dist

import zero as _zero


def __getattr__(name: str) -> Any:
    """Look the name up in `torch.distributed`."""
    return getattr(_dist, name)


def is_initialized() -> bool:
    """Whether there is a process group."""
    _tell_accelerate()
    return _dist.is_initialized()


def _tell_accelerate() -> None:
    """Say the backend where Accelerate asks for none, as it does without a GPU; it takes that for "one process"."""
    state = sys.modules.get("accelerate.state")
    shared = state.PartialState._shared_state if state is not None else {}
    if _dist.is_initialized() and "backend" in shared and shared["backend"] is None:
        shared["backend"] = _dist.get_backend()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """`zero.init_distributed`, and also a process alone has a group afterwards, as programs for DeepSpeed expect."""
    where = (init_method, dist_init_required, config, rank, world_size)
    _zero.init_distributed(dist_backend, auto_mpi_discovery, distributed_port, verbose, timeout, *where)
    if not _dist.is_initialized():
        _dist.init_process_group(dist_backend or "gloo", store=_dist.HashStore(), rank=0, world_size=1)
    _tell_accelerate()
