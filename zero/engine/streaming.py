"""The weights of a running model into safetensors files, one unit at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint.model_files import write_model
from zero.checkpoint.safe_file import TensorChunk
from zero.checkpoint.staging import LazyTensor
from zero.core.access import GatheredParameters
from zero.core.owner import owner_of
from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit


def stream_model(
    state: Mapping[str, Any], sharded: ShardedModule, folder: Path, name: str, limit: int | None, keep: bool
) -> str | None:
    """Write the tensors of `state` as `zero.checkpoint.model_files.write_model` does, where `keep`; returns a problem.

    state: the module's own parameters and buffers by name, in one order on all ranks. A collective: the ranks that do
    not `keep` help to gather, one unit after the other, also when the one that writes fails.
    """
    first: dict[int, str] = {}
    tied = {alias: first[id(value)] for alias, value in state.items() if first.setdefault(id(value), alias) != alias}
    values = {key: value for key, value in state.items() if key not in tied and isinstance(value, torch.Tensor)}
    # A file has the widest dtypes first; in this order, none of its units is met twice.
    values = dict(sorted(values.items(), key=lambda item: (-item[1].element_size(), _place(item[1]))))
    units = {key: _cut(value, sharded) for key, value in values.items()}
    walk = _Walk([unit for unit in units.values() if unit is not None])
    pieces = []
    for key, value in values.items():
        numbers = LazyTensor(value.dtype, value.numel(), partial(_range, value, walk, units[key]))
        pieces.append(TensorChunk("weight", key, 0, tuple(value.shape), numbers))
    problem = None
    try:
        if keep:
            write_model(folder, name, pieces, tied, limit)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        walk.finish()
    return problem


class _Walk:
    """Gathers units in one order on all ranks, each once, and releases the one before."""

    def __init__(self, units: list[Unit]) -> None:
        self._gathered = _gathered(list({id(unit): unit for unit in units}.values()))
        self._at: Unit | None = None

    def reach(self, unit: Unit) -> None:
        """Go on to `unit`, which comes after all that were reached before."""
        while self._at is not unit:
            self._at = next(self._gathered)

    def finish(self) -> None:
        """Gather the rest, since the other ranks do, and release the last."""
        for _ in self._gathered:
            pass


def _gathered(units: list[Unit]) -> Iterator[Unit]:
    for unit in units:
        with GatheredParameters(unit.params):
            yield unit


def _place(value: torch.Tensor) -> int:
    owner = owner_of(value)
    return -1 if owner is None else owner.unit.index


def _cut(value: torch.Tensor, sharded: ShardedModule) -> Unit | None:
    """The unit of a parameter that has to be gathered."""
    owner = owner_of(value)
    return owner.unit if owner is not None and owner.unit.cut and owner.unit in sharded.units else None


def _range(value: torch.Tensor, walk: _Walk, unit: Unit | None, start: int, numel: int) -> torch.Tensor:
    if unit is not None:
        walk.reach(unit)
    return value.detach().reshape(-1)[start : start + numel]
