"""Whole weights out of a running model, one unit at a time: to a caller, and into safetensors files."""

from __future__ import annotations

import fnmatch
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from zero.checkpoint.model_files import write_model
from zero.checkpoint.safe_file import TensorChunk
from zero.checkpoint.staging import LazyTensor
from zero.core.access import GatheredParameters
from zero.core.owner import owner_of
from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit
from zero.engine.status import Status

Merge = Callable[[str, torch.Tensor], "torch.Tensor | tuple[str, torch.Tensor] | None"]
T = TypeVar("T")


def unit_by_unit(state: Mapping[str, Any], widest_first: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a state_dict with `keep_vars`, each once, by its first name, in the order in which `walk` goes.

    widest_first: those of the widest dtype first, as in a safetensors file; the dtype of a unit is one.
    """
    once: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            once.setdefault(id(value), (name, value))
    width = -1 if widest_first else 0
    return dict(sorted(once.values(), key=lambda item: (width * item[1].element_size(), _place(item[1]))))


@torch.no_grad()
def walk(values: Mapping[str, torch.Tensor], sharded: ShardedModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers whole, as the model computes with them, while one unit is gathered at a time.

    values: the module's own, in the order of `unit_by_unit`. A collective: all ranks must go to the end. A tensor may
    be the live one, and is to be read only; one that is kept keeps the memory of its unit.
    """
    for unit, items in itertools.groupby(values.items(), key=lambda item: unit_to_gather(item[1], sharded)):
        with GatheredParameters(() if unit is None else unit.params):
            for name, value in items:
                yield name, value.detach()


def to_the_end(items: Iterable[T], status: Status, wanted: bool = True) -> Iterator[T]:
    """Yield the items of a collective, where they are `wanted`; while it goes on, `status` lets no step change them.

    Where the caller ends before, by an exception too, the rest goes on: other ranks wait for messages of this one.
    """
    status.streams += 1
    try:
        for item in items:
            if wanted:
                try:
                    yield item
                except GeneratorExit:
                    wanted = False
            item = None  # else it would be alive beside the next
    finally:
        status.streams -= 1


@torch.no_grad()
def merged(
    values: Mapping[str, torch.Tensor], sharded: ShardedModule, merge: Merge | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """`walk` with copies that are the caller's, or what `merge` makes of each, in `dtype` where it is floating."""
    for name, tensor in walk(values, sharded):
        converts = dtype not in (None, tensor.dtype) and tensor.is_floating_point()
        # A copy in any case: a caller that quantises it in place must not change what trains.
        tensor = tensor.to(dtype) if converts and merge is None else tensor.clone()
        made = (name, tensor)
        if merge is not None:
            made = merge(name, tensor)
            made = (name, made) if isinstance(made, torch.Tensor) else made
        tensor = None  # where it was merged into another, it goes
        if made is not None:
            yield made[0], made[1].to(dtype) if dtype is not None and made[1].is_floating_point() else made[1]
        made = None  # the next unit is gathered behind this


def choose(state: Mapping[str, T], patterns: str | Collection[str] | None) -> dict[str, T]:
    """What `patterns` name, as fnmatch does; ValueError for one that names nothing."""
    if patterns is None:
        return dict(state)
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    hits = {pattern: fnmatch.filter(state, pattern) for pattern in patterns}
    if missing := [pattern for pattern, names in hits.items() if not names]:
        raise ValueError(
            f"names=...: {missing} match no parameter or buffer of the model; its names are those of its state_dict(), "
            f"such as {next(iter(state), None)!r}, and patterns of them, such as '*.weight'"
        )
    wanted = {name for names in hits.values() for name in names}
    return {name: value for name, value in state.items() if name in wanted}


def stream_model(
    state: Mapping[str, Any], sharded: ShardedModule, folder: Path, name: str, limit: int | None, keep: bool
) -> str | None:
    """Write the tensors of `state` as `zero.checkpoint.model_files.write_model` does, where `keep`; returns a problem.

    state: the module's own parameters and buffers by name, in one order on all ranks. A collective: the ranks that do
    not `keep` help to gather, one unit after the other, also when the one that writes fails.
    """
    values = unit_by_unit(state, widest_first=True)
    names = {id(value): key for key, value in values.items()}
    tied = {key: names[id(value)] for key, value in state.items() if names.get(id(value), key) != key}
    stream = walk(values, sharded)
    part = _reader(stream)
    pieces = []
    for key, value in values.items():
        numbers = LazyTensor(value.dtype, value.numel(), functools.partial(part, key))
        pieces.append(TensorChunk("weight", key, 0, tuple(value.shape), numbers))
    problem = None
    try:
        if keep:
            write_model(folder, name, pieces, tied, limit)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        for _ in stream:
            pass
    return problem


def _reader(stream: Iterator[tuple[str, torch.Tensor]]) -> Callable[[str, int, int], torch.Tensor]:
    """Gives ranges of the tensors of a stream, which are asked for in its order: by name, first element and number."""
    at: tuple[str | None, torch.Tensor | None] = (None, None)

    def part(name: str, start: int, numel: int) -> torch.Tensor:
        nonlocal at
        while at[0] != name:
            at = (None, None)  # the memory of the last unit is for the next
            at = next(stream)
        return at[1].reshape(-1)[start : start + numel]

    return part


def _place(value: torch.Tensor) -> int:
    owner = owner_of(value)
    return -1 if owner is None else owner.unit.index


def unit_to_gather(value: torch.Tensor, sharded: ShardedModule) -> Unit | None:
    """The unit of a parameter that is cut, by this engine."""
    owner = owner_of(value)
    return owner.unit if owner is not None and owner.unit.cut and owner.unit in sharded.units else None
