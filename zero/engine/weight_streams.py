"""Whole weights out of a running model, one unit at a time: to a caller, and into safetensors files."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from zero.checkpoint.model_files import write_model
from zero.checkpoint.safe_file import TensorChunk
from zero.checkpoint.staging import LazyTensor
from zero.core import comm
from zero.core.access import GatheredParameters
from zero.core.agree import if_different
from zero.core.owner import owner_of
from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit
from zero.core.values import full_shape, is_part, with_parts
from zero.engine.status import Status

Merge = Callable[[str, torch.Tensor], "torch.Tensor | tuple[str, torch.Tensor] | None"]
T = TypeVar("T")


class Listed(NamedTuple):
    """One tensor of the model: all names that it has, and itself.

    holder: the place of the first rank that has it, where others have not; there `value` is on the meta device.
    """

    names: tuple[str, ...]
    value: torch.Tensor
    holder: int | None = None


def list_tensors(state: Mapping[str, Any], sharded: ShardedModule, of_all: bool = True) -> list[Listed]:
    """The tensors of a state_dict with `keep_vars`, each once, in the order in which `walk` goes.

    of_all: with those that only other ranks have, stages of a pipeline say; a collective then.
    """
    found: dict[int, Listed] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            before = found.get(id(value), Listed((), value))
            found[id(value)] = before._replace(names=(*before.names, name))
    own = sorted(found.values(), key=lambda each: _place(each.value))
    if not of_all or sharded.world.size == 1:
        return own
    lines = [[each.names, str(each.value.dtype).removeprefix("torch."), shape_of(each.value)] for each in own]
    if (said := if_different(lines, sharded.world)) is None:
        return own
    here, listed = {each.names[0]: each.value for each in own}, []
    holders: dict[str, list[int]] = {}
    for place, each in enumerate(said):
        for names, *_ in each:
            holders.setdefault(names[0], []).append(place)
    for place, each in enumerate(said):
        for names, dtype, shape in each:
            if holders[names[0]][0] == place:
                absent = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                alone = len(holders[names[0]]) < sharded.world.size
                listed.append(Listed(tuple(names), here.get(names[0], absent), place if alone else None))
    return listed


@torch.no_grad()
def walk(tensors: Iterable[Listed], sharded: ShardedModule) -> Iterator[tuple[Listed, torch.Tensor]]:
    """Yield parameters and buffers whole, as the model computes with them, while one unit is gathered at a time.

    tensors: in the order of `list_tensors`. A collective: all ranks must go to the end. A tensor may be the live one,
    and is to be read only; one that is kept keeps the memory of its unit.
    """
    for unit, items in itertools.groupby(tensors, key=lambda item: unit_to_gather(item.value, sharded)):
        with GatheredParameters(() if unit is None else unit.params):
            for item in items:
                yield item, _whole(item, sharded)


def _whole(item: Listed, sharded: ShardedModule) -> torch.Tensor:
    """The tensor with the parts that other ranks have, also on ranks that have none."""
    owner, value = owner_of(item.value), item.value.detach()
    if owner is not None:
        value = with_parts(owner, value.reshape(-1)).view(full_shape(owner)) if is_part(owner) else value
    if item.holder is not None:
        here = sharded.world.rank == item.holder
        value = value.to(sharded.device) if here else torch.empty_like(value, device=sharded.device)
        comm.broadcast(value, item.holder, sharded.world)
    return value


def shape_of(value: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor of the model, or of the larger one that it is a part of."""
    owner = owner_of(value)
    return tuple(value.shape) if owner is None else full_shape(owner)


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
    tensors: Mapping[str, Listed], sharded: ShardedModule, merge: Merge | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """`walk` by name with copies that are the caller's, or what `merge` makes of each, in `dtype` where floating."""
    chosen = {each.names: name for name, each in tensors.items()}
    for item, tensor in walk(tensors.values(), sharded):
        name = chosen[item.names]
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


def choose(tensors: Iterable[Listed], patterns: str | Collection[str] | None) -> dict[str, Listed]:
    """By its first name each tensor that `patterns` name, as fnmatch does; ValueError for one that names nothing."""
    named = {name: each for each in tensors for name in each.names}
    if patterns is not None:
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        hits = {pattern: fnmatch.filter(named, pattern) for pattern in patterns}
        if missing := [pattern for pattern, names in hits.items() if not names]:
            raise ValueError(
                f"names=...: {missing} match no parameter or buffer of the model; its names are those of its "
                f"state_dict(), such as {next(iter(named), None)!r}, and patterns of them, such as '*.weight'"
            )
        wanted = {name for names in hits.values() for name in names}
        named = {name: each for name, each in named.items() if name in wanted}
    first = {each.names: name for name, each in reversed(named.items())}
    return {name: each for name, each in named.items() if first[each.names] == name}


def stream_model(
    tensors: Iterable[Listed], sharded: ShardedModule, folder: Path, name: str, limit: int | None, keep: bool
) -> str | None:
    """Write these as `zero.checkpoint.model_files.write_model` does, where `keep`; returns a problem.

    tensors: as `list_tensors` gives them, on all ranks. A collective: the ranks that do not `keep` help to gather, one
    unit after the other, also when the one that writes fails.
    """
    tensors = sorted(tensors, key=lambda each: -each.value.element_size())  # the widest first, as in the files
    tied = {other: each.names[0] for each in tensors for other in each.names[1:]}
    stream = walk(tensors, sharded)
    part = _reader(stream)
    pieces = []
    for each in tensors:
        shape = shape_of(each.value)
        numbers = LazyTensor(each.value.dtype, math.prod(shape), functools.partial(part, each.names[0]))
        pieces.append(TensorChunk("weight", each.names[0], 0, shape, numbers))
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


def _reader(stream: Iterator[tuple[Listed, torch.Tensor]]) -> Callable[[str, int, int], torch.Tensor]:
    """Gives ranges of the tensors of a stream, which are asked for in its order: by name, first element and number."""
    at: tuple[str | None, torch.Tensor | None] = (None, None)

    def part(name: str, start: int, numel: int) -> torch.Tensor:
        nonlocal at
        while at[0] != name:
            at = (None, None)  # the memory of the last unit is for the next
            item, tensor = next(stream)
            at = (item.names[0], tensor)
            tensor = None
        return at[1].reshape(-1)[start : start + numel]

    return part


def _place(value: torch.Tensor) -> int:
    owner = owner_of(value)
    return -1 if owner is None else owner.unit.index


def is_here(value: torch.Tensor, sharded: ShardedModule) -> bool:
    """Whether all of a tensor of the module is on this rank, for as long as it trains."""
    owner = owner_of(value)
    return unit_to_gather(value, sharded) is None and (owner is None or not is_part(owner))


def unit_to_gather(value: torch.Tensor, sharded: ShardedModule) -> Unit | None:
    """The unit of a parameter that is resharded, by this engine."""
    owner = owner_of(value)
    return owner.unit if owner is not None and owner.unit.resharded and owner.unit in sharded.units else None
