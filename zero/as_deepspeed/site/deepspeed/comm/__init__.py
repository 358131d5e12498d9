"""`torch.distributed` by the name `deepspeed.comm`, with what DeepSpeed has beside it."""

import functools
import os
import sys
import weakref
from typing import Any

import torch.distributed as _dist

import zero as _zero
from zero.engine.joining import refuse_nccl as _refuse_nccl

_find = globals()["__getattr__"]  # which `deepspeed._names` gives every module
_engines: Any = weakref.WeakSet()  # those that deepspeed.initialize has made


def __getattr__(name: str) -> Any:
    """Look the name up in `torch.distributed`."""
    return getattr(_dist, name) if hasattr(_dist, name) else _find(name)


def is_initialized() -> bool:
    """Whether there is a process group."""
    _tell_accelerate()
    return _dist.is_initialized()


@functools.wraps(_zero.init_distributed)
def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """`zero.init_distributed`, and also a process alone has a group afterwards, as programs for DeepSpeed expect."""
    _zero.init_distributed(dist_backend, *args, **kwargs)
    if not _dist.is_initialized():
        _refuse_nccl(dist_backend)
        _dist.init_process_group(dist_backend or "gloo", store=_dist.HashStore(), rank=0, world_size=1)
    _tell_accelerate()


def get_local_rank() -> int:
    """This process among those of its host, as its launcher says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """The group of all ranks."""
    return _dist.group.WORLD


def inference_all_reduce(tensor: Any, op: Any = _dist.ReduceOp.SUM, group: Any = None, **_: Any) -> Any:
    """`torch.distributed.all_reduce`, in place; more keywords say what DeepSpeed logs."""
    return _dist.all_reduce(tensor, op, group)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """`engine.log_comms_summary()` of each engine that has `comms_logger.enabled`; RuntimeError where none has.

    return_dict: also return, by "summary" and operation, `count`, `sent` (bytes), `seconds` and `exposed` of this rank.
    """
    noted = [engine.log_comms_summary() for engine in _engines if engine._config.comms_logger.enabled]
    if not noted:
        raise RuntimeError("log_summary(): nothing was noted; set comms_logger.enabled to true in the JSON")
    return {"summary": {name: vars(each) for one in noted for name, each in one.items()}} if return_dict else None


def _tell_accelerate() -> None:
    """Say the backend where Accelerate asks for none, as it does without a GPU; it takes that for "one process"."""
    state = sys.modules.get("accelerate.state")
    shared = state.PartialState._shared_state if state is not None else {}
    if _dist.is_initialized() and "backend" in shared and shared["backend"] is None:
        shared["backend"] = _dist.get_backend()
