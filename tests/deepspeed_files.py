"""Writes a checkpoint as DeepSpeed 0.19 lays it out (ZeRO 1, 2, 3), from whole tensors, without DeepSpeed.

What each file holds, and where elements lie, was compared with files that DeepSpeed 0.19.8 itself had written with 2
and 3 ranks: zero_to_fp32.py, runtime/engine.py, runtime/zero/stage_1_and_2.py and stage3.py of it say the same. Objects
of its classes are pickled under its names, so a reader without DeepSpeed meets what it would meet. The numbers in
param_slice_mappings are made up.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

HERE = "deepspeed.runtime.zero.config", "deepspeed.runtime.fp16.loss_scaler", "deepspeed.utils.tensor_fragment"


class ZeroStageEnum(int, Enum):
    """As DeepSpeed's."""

    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    """As DeepSpeed's."""

    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


@dataclass
class fragment_address:
    """As DeepSpeed's."""

    numel: int
    start: int


@contextmanager
def named() -> Iterator[None]:
    """Inside, the classes above can be pickled under the names that DeepSpeed has for them."""
    classes = dict(zip(HERE, (ZeroStageEnum, LossScaler, fragment_address), strict=True))
    before = {kind: kind.__module__ for kind in classes.values()}
    packages = {".".join(name.split(".")[:end]) for name in HERE for end in range(1, name.count(".") + 2)}
    try:
        for name in packages:
            sys.modules[name] = types.ModuleType(name)
        for name, kind in classes.items():
            setattr(sys.modules[name], kind.__name__, kind)
            kind.__module__ = name
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        for kind, name in before.items():
            kind.__module__ = name


@dataclass
class Run:
    """Whole tensors of a run; groups: names of the trained parameters, in the order of the optimizer's groups."""

    groups: list[list[str]]
    masters: Mapping[str, torch.Tensor]
    states: Mapping[str, Mapping[str, torch.Tensor]]  # by name of the state, then of the parameter
    frozen: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    step: int = 3
    client: Mapping[str, Any] = field(default_factory=dict)


def write(root: Path, run: Run, stage: int, world: int, padding: int = 0) -> Path:
    """Write `root`/global_step<N> and `root`/latest; `padding`: elements behind each parameter (ZeRO 1 and 2)."""
    tag = root / f"global_step{run.step}"
    tag.mkdir(parents=True)
    (root / "latest").write_text(tag.name)
    prefix = "bf16_" if run.dtype == torch.bfloat16 else ""
    with named():
        for rank in range(world):
            inner = _cut_each(run, rank, world) if stage == 3 else _cut_groups(run, rank, world, stage, padding)
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": inner, "ds_config": _config(run), "ds_version": "0.19.8"}, tag / name)
            if stage == 3 or rank == 0:
                name = f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt"
                torch.save(_model(run, rank, world, stage), tag / name)
    return tag


def _config(run: Run) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": run.dtype == torch.bfloat16}}


def _range(value: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """A rank's range of ceil(numel / world) elements, with zeros behind the last."""
    each = -(-value.numel() // world)
    padded = torch.cat([value.reshape(-1), value.new_zeros(each * world - value.numel())])
    return padded[rank * each : (rank + 1) * each].clone()


def _common(rank: int) -> dict[str, Any]:
    return {"loss_scaler": LossScaler(), "dynamic_loss_scale": False, "overflow": False}


def _inside(run: Run, flats: Mapping[str, list[torch.Tensor]]) -> dict[str, Any]:
    """The state_dict of torch's optimizer over the flat tensors."""
    count = len(run.groups)
    state = {
        index: {"step": torch.tensor(float(run.step)), **{key: flat[index] for key, flat in flats.items()}}
        for index in range(count)
    }
    groups = [{"lr": 0.01, "weight_decay": 0.1, "params": [index]} for index in range(count)]
    return {"state": state, "param_groups": groups}


def _cut_groups(run: Run, rank: int, world: int, stage: int, padding: int) -> dict[str, Any]:
    def flat(values: Mapping[str, torch.Tensor], names: list[str], lean: bool) -> torch.Tensor:
        pieces = [piece for name in names for piece in (values[name].reshape(-1), torch.zeros(padding))]
        whole = torch.cat(pieces)
        behind = -whole.numel() % (2 * world)
        whole = torch.cat([whole, torch.zeros(behind)])
        length = whole.numel() // world
        end = (rank + 1) * length - (behind if lean and rank == world - 1 else 0)
        return whole[rank * length : end].clone()

    flats = {key: [flat(values, names, False) for names in run.groups] for key, values in run.states.items()}
    return {
        **_common(rank),
        "clip_grad": 1.0,
        "base_optimizer_state": _inside(run, flats),
        "single_partition_of_fp32_groups": [flat(run.masters, names, True) for names in run.groups],
        "zero_stage": ZeroStageEnum(stage),
        "group_paddings": [0 for _ in run.groups],
        "param_alignment_paddings": [[padding] * len(names) for names in run.groups],
        "partition_count": [world] * len(run.groups),
        "ds_version": "0.19.8",
        "param_slice_mappings": [OrderedDict((name, fragment_address(1, 0)) for name in names) for names in run.groups],
    }


def _cut_each(run: Run, rank: int, world: int) -> dict[str, Any]:
    def flat(values: Mapping[str, torch.Tensor], names: list[str]) -> torch.Tensor:
        return torch.cat([_range(values[name], rank, world) for name in names])

    flats = {key: [flat(values, names) for names in run.groups] for key, values in run.states.items()}
    return {
        "zero_stage": ZeroStageEnum.weights,
        **_common(rank),
        "partition_count": world,
        "optimizer_state_dict": _inside(run, flats),
        "fp32_flat_groups": [flat(run.masters, names) for names in run.groups],
    }


def _model(run: Run, rank: int, world: int, stage: int) -> dict[str, Any]:
    whole = {**run.masters, **run.frozen}
    module: OrderedDict[str, torch.Tensor] = OrderedDict(run.buffers)
    for name, value in [*whole.items(), *((other, whole[name]) for other, name in run.tied.items())]:
        module[name] = torch.empty(0, dtype=run.dtype) if stage == 3 else value.to(run.dtype)
    shapes = [OrderedDict((name, run.masters[name].shape) for name in names) for names in run.groups]
    cut = {name: value if stage == 2 else _range(value, rank, world) for name, value in run.frozen.items()}
    return {
        "module": module,
        "buffer_names": list(run.buffers),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None if stage == 1 else OrderedDict((name, v.shape) for name, v in run.frozen.items()),
        "frozen_param_fragments": None if stage == 1 else OrderedDict((n, v.to(run.dtype)) for n, v in cut.items()),
        "shared_params": dict(run.tied) if rank == 0 else {},
        "lr_scheduler": {"last_batch_iteration": run.step - 1},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": run.step,
        "global_samples": run.step * 2 * world,
        "dp_world_size": world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _config(run),
        "ds_version": "0.19.8",
        **run.client,
    }
