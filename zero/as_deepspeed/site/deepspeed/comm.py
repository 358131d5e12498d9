"""`torch.distributed` by the name `deepspeed.comm`, with DeepSpeed's `init_distributed`."""

import functools
import sys
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


@functools.wraps(_zero.init_distributed)
def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """`zero.init_distributed`, and also a process alone has a group afterwards, as programs for DeepSpeed expect."""
    _zero.init_distributed(dist_backend, *args, **kwargs)
    if not _dist.is_initialized():
        _dist.init_process_group(dist_backend or "gloo", store=_dist.HashStore(), rank=0, world_size=1)
    _tell_accelerate()


def _tell_accelerate() -> None:
    """Say the backend where Accelerate asks for none, as it does without a GPU; it takes that for "one process"."""
    state = sys.modules.get("accelerate.state")
    shared = state.PartialState._shared_state if state is not None else {}
    if _dist.is_initialized() and "backend" in shared and shared["backend"] is None:
        shared["backend"] = _dist.get_backend()
