"""From what all ranks have written to the index of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from zero.checkpoint.index import Index, Parameter, Part, Stored
from zero.checkpoint.safe_file import NAMES, TensorChunk

Line = list[Any]  # [kind, name, dtype, shape, start, numel, file, offset, checksums], as JSON carries it


def line_of(chunk: TensorChunk, part: Part) -> Line:
    """What a rank tells of a chunk that it has written."""
    return [chunk.kind, chunk.name, NAMES[chunk.values.dtype], list(chunk.shape), *part]


def assemble(lines: Iterable[Line], known: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any]) -> Index:
    """The index of everything that `lines` of all ranks say.

    known:  for each parameter its "group", "numbers", "dtype" and "shape".
    values: the other fields of `Index`.
    """
    by_kind: dict[str, dict[str, Stored]] = {}
    for kind, name, dtype, shape, start, numel, file, offset, sums in lines:
        part = Part(start, numel, file, offset, tuple(sums))
        tensors = by_kind.setdefault(kind, {})
        before = tensors.get(name, Stored(dtype, tuple(shape), ()))
        tensors[name] = replace(before, parts=tuple(sorted((*before.parts, part))))
    weights, masters = by_kind.pop("weight", {}), by_kind.pop("master", {})
    buffers, tensors = by_kind.pop("buffer", {}), by_kind.pop("tensor", {})
    scales = {kind.removeprefix("scales."): by_kind.pop(kind) for kind in list(by_kind) if kind.startswith("scales.")}
    parameters = {
        name: Parameter(
            weight=weights.get(name, Stored(more["dtype"], tuple(more["shape"]), ())),  # one without elements
            master=masters.get(name),
            moments=_of(by_kind, name),
            scales=_of(scales, name),
            numbers=more["numbers"],
            group=more["group"],
        )
        for name, more in known.items()
    }
    return Index(parameters=parameters, buffers=buffers, tensors=tensors, **values)


def _of(kinds: Mapping[str, Mapping[str, Stored]], name: str) -> dict[str, Stored]:
    return {kind: tensors[name] for kind, tensors in kinds.items() if name in tensors}


def file_name(kind: str, rank: int, world_size: int, save: str) -> str:
    """What a rank's file of one kind is called; `save` keeps it apart from those of an earlier save of the tag."""
    return f"{kind}-{rank:05d}-of-{world_size:05d}.{save}.safetensors"
