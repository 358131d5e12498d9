"""DeepSpeed's functions for recomputing activations, by the names they have there.

    zero.checkpointing.configure(mpu, deepspeed_config="zero.json")
    y = zero.checkpointing.checkpoint(block, x)

Inside the forward of an engine, `checkpoint` does as the engine's JSON says and needs no `configure`, unless that was
called. Modules that the JSON names under `zero.recompute` need neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch.distributed as dist
from torch import nn

from zero.config import Config, ConfigError, load
from zero.core.agree import alike
from zero.core.comm import Axis
from zero.core.world import axis_of
from zero.recompute.call import recomputed
from zero.recompute.holder import HOLDER, SeedTracker
from zero.recompute.saved_inputs import ALONE, NO_NUMBER, InputStore

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]

_GROUPS = ("get_model_parallel_group", "get_tensor_model_parallel_group")


def configure(
    mpu_: Any,
    deepspeed_config: str | PathLike | Mapping[str, Any] | Config | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how the inputs of recomputed calls are kept, for this process; an argument overrides its key of the JSON.

    mpu_: what names the ranks that compute one sample together, over which `partition_activations` cuts inputs: an
    object with `get_model_parallel_group()` (or `get_tensor_model_parallel_group()`), a process group, or None.
    deepspeed_config: a path, a dict or a checked config, of which the section `activation_checkpointing` counts.
    All ranks of `mpu_` call it, which is collective for them. Raises ValueError for an `mpu_` that does not fit,
    ConfigError for the JSON and the arguments, RuntimeError where the ranks say different things.
    """
    axis = _axis(mpu_)
    arguments = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = _config(deepspeed_config).activation_checkpointing.model_dump() if deepspeed_config else {}
    section |= {name: value for name, value in arguments.items() if value is not None}
    settings = _config({"activation_checkpointing": section}).activation_checkpointing
    if settings.contiguous_memory_optimization and settings.number_checkpoints is None:
        raise ConfigError([f"activation_checkpointing.number_checkpoints: {NO_NUMBER}; give num_checkpoints"])
    what = "the ranks of mpu_ do not configure the same"
    alike([f"{name} = {value}" for name, value in settings if name != "profile"], axis, what)
    inputs = InputStore(settings, axis)
    reset()
    HOLDER.axis, HOLDER.inputs = axis, inputs


def is_configured() -> bool:
    """Whether `configure` was called."""
    return HOLDER.inputs is not None


def reset() -> None:
    """Free the memory that is kept for further inputs; the settings of `configure` stay, as in DeepSpeed."""
    if HOLDER.inputs is not None:
        HOLDER.inputs.buffers.close()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, of which only the inputs are kept; the backward computes the activations again.

    Dropout gives the same mask and autocast is the same; so are the buffers of a `function` that is a module. Tensors
    among the arguments, and in tuples, lists and dicts, are kept as `configure` or the JSON of the engine around says.
    The same as `non_reentrant_checkpoint`.
    """
    module = function if isinstance(function, nn.Module) else None
    return recomputed(function, args, kwargs, HOLDER.scope.inputs, module=module)


non_reentrant_checkpoint = checkpoint


def get_cuda_rng_tracker() -> SeedTracker:
    """Named streams of random numbers; a recomputation finds them as its forward did. Without a GPU, of the CPU."""
    return HOLDER.seeds


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch equally on the ranks of `mpu_`, and the stream of `get_cuda_rng_tracker().fork()` by rank."""
    HOLDER.seeds.seed_model_parallel(seed, HOLDER.axis.rank)


def _axis(mpu: Any) -> Axis:
    if mpu is None:
        return ALONE
    group = mpu
    if not isinstance(mpu, dist.ProcessGroup):
        name = next((name for name in _GROUPS if callable(getattr(mpu, name, None))), None)
        if name is None:
            raise ValueError(
                f"mpu_: got a {type(mpu).__name__}; wanted an object with get_model_parallel_group(), a process group, "
                "or None"
            )
        group = getattr(mpu, name)()
    if not dist.is_initialized():
        raise ValueError("mpu_: there is no process group yet; call zero.init_distributed() first")
    if dist.get_rank(group) < 0:
        raise ValueError(f"mpu_: its group does not hold this process (rank {dist.get_rank()})")
    return axis_of(group)


def _config(source: Any) -> Config:
    if isinstance(source, Config):
        return source
    return load(source, dist.get_world_size() if dist.is_initialized() else 1, filled=False)
