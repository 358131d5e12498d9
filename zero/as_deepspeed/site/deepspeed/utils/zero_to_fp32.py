"""The exact fp32 weights of a checkpoint, by DeepSpeed's functions."""

from pathlib import Path

import torch
from torch import nn

import zero
from zero.checkpoint.model_files import consolidate, model_chunks, size_of
from zero.checkpoint.reader import Reader
from zero.checkpoint.weight_files import weights_at
from zero.core.init.deferred_param import DeferredParam
from zero.core.owner import owner_of


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, on the CPU; tied ones are one tensor. Raises ValueError where there are none."""
    if exclude_frozen_parameters:
        raise ValueError("exclude_frozen_parameters: give it to engine.save_checkpoint; here all that is there is read")
    folder, index = weights_at(Path(checkpoint_dir, tag or ""))
    with Reader(folder, index) as reader:
        parts = [(each.name, each.values, each.shape) for each in model_chunks(reader, "fp32")]
        state = {name: values.of(0, values.count).to(values.dtype).view(shape) for name, values, shape in parts}
    return state | {other: state[one] for other, one in index.tied.items()}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """The model with those weights, converted to its dtypes; a collective where an engine or `zero.Init` has it."""
    if all(isinstance(owner.unit, DeferredParam) for owner in map(owner_of, model.parameters()) if owner is not None):
        zero.load_weights(model, Path(checkpoint_dir, tag or ""))
        return model
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    with zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.load_state_dict(state)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
) -> None:
    """Write them as `zero consolidate` does; files are safetensors, whatever `safe_serialization` says."""
    folder, _ = weights_at(Path(checkpoint_dir, tag or ""))
    consolidate(folder, Path(output_dir), limit=size_of(max_shard_size, "max_shard_size"), hf=True)
