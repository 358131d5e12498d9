"""Helpers of training scripts, from several modules of DeepSpeed."""

import gc
import logging
import operator
import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn

from deepspeed import __version__
from deepspeed.accelerator import get_accelerator
from zero.core.owner import cut_of, owner_of
from zero.log import logger as _zero_logger
from zero.log import rank
from zero.parallel.grid_groups import GridGroups, groups
from zero.plan.tensors import sizes_of

# What `accelerate launch` imports of DeepSpeed's launcher.
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
PDSH_MAX_FAN_OUT = 1024


logger = _zero_logger.getChild("deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks only; None or -1 among them: on all."""
    if ranks is None or rank() in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank(), message)


def _short(version: str | None) -> str:
    return ".".join((version or "0.0").split(".")[:2])


_nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and dist.is_nccl_available() else (0, 0)
version = __version__
torch_info = {
    "version": _short(torch.__version__),
    "bf16_support": get_accelerator().is_bf16_supported(),
    "cuda_version": _short(torch.version.cuda),
    "nccl_version": ".".join(map(str, _nccl[:2])),
    "hip_version": _short(torch.version.hip),
}


class ZeRORuntimeException(Exception):
    """What DeepSpeed raises where a checkpoint is of another world size. Here every checkpoint loads: nothing does."""


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print on rank 0 what memory is in use, and begin a new peak; nothing without `force`."""
    if not force or rank():
        return
    gc.collect()
    device, host = get_accelerator(), psutil.virtual_memory()
    asked = {"MA": "memory_allocated", "Max_MA": "max_memory_allocated"}
    asked |= {"CA": "memory_reserved", "Max_CA": "max_memory_reserved"}
    used = " ".join(f"{name} {getattr(device, call)() / 2**30:.2f} GB" for name, call in asked.items())
    print(f"{message}\n{used}\nCPU Virtual Memory: used = {host.used / 2**30:.2f} GB, percent = {host.percent}%")
    device.reset_peak_memory_stats()


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item` on `device`, also what lies in lists, tuples and dicts; in place where `criterion_func` says so."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device)
        return item
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        moved = [move_to_device(value, device, criterion_func) for value in item]
        return moved if isinstance(item, list) else tuple(moved)
    return item.to(device) if hasattr(item, "to") else item


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Clip `.grad` of parameters that no engine has, by the mean norm over all ranks, which is returned.

    Raises ValueError for parameters of an engine, which clips by itself, and for model parallelism.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(owner_of(param) is not None for param in params):
        raise ValueError("clip_grad_norm_ of parameters that an engine has: set gradient_clipping in the JSON instead")
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        raise ValueError("clip_grad_norm_(mpu=...) with model parallelism: not in zero yet")
    norm = torch.nn.utils.get_total_norm([each.grad for each in params if each.grad is not None], norm_type)
    if dist.is_initialized():
        dist.all_reduce(norm)
        norm /= dist.get_world_size()
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with each tensor in nested lists, tuples and dicts copied to `device`.

    `torch.save` writes the whole storage that a tensor is a view of; a copy has one of its own.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """What `model` has under the path, as in "layers.0.mlp"."""
    return operator.attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: nn.Module) -> None:
    """Put `module` there."""
    above, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, name, module)


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether the parameter is marked as one of an expert."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float = 178956971,
) -> list[dict[str, Any]]:
    """The groups as they are, in a list: the engine knows which parameters are of experts."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is at least the one and at most the other, by major and minor version."""
    here = Version(_short(torch.__version__))
    return Version(str(min_version or 0)) <= here <= (Version(str(max_version)) if max_version else here)


mpu: Any = None  # of the last engine that was given one


def _of_mpu(what: str, *alone: int) -> Any:
    if mpu is None and not alone:
        raise RuntimeError("no ranks share sequences: deepspeed.initialize() was given no mpu")
    return alone[0] if mpu is None else getattr(mpu, f"get_sequence_parallel_{what}")()


_get_sequence_parallel_world_size = partial(_of_mpu, "world_size", 1)
_get_sequence_parallel_rank = partial(_of_mpu, "rank", 0)
_get_sequence_parallel_group = partial(_of_mpu, "group")

grid: GridGroups | None = None  # the ranks of the last engine that has layers in parts; of the first, where none has


def __getattr__(name: str) -> Any:
    """Functions of groups by Megatron's names, `get_tensor_model_parallel_group` say, of the engine there is then."""
    if not (name.startswith("get_") and hasattr(GridGroups, name)):
        raise AttributeError(f"{__name__} has no {name}")
    return lambda: getattr(grid or groups({}), name)()


def is_autotp_training_mode() -> bool:
    """True: layers are cut for training only."""
    return True


def set_autotp_mode(training: bool = False) -> None:
    """Nothing, as there is no other mode."""


def get_shard_size_list(total_size: int, mp_size: int, name: str | None = None) -> list[int]:
    """How many of so many features each rank has."""
    return sizes_of(total_size, mp_size)


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Whether ranks have parts of it."""
    return cut_of(p) is not None or any(getattr(p, f"{name}model_parallel", False) for name in ("", "tensor_"))
