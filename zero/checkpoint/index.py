"""The index of a checkpoint: which elements of which tensor lie where in which file, and all that is no tensor.

Words: a *tensor* is whole, as a model knows it; a *part* is a range of its elements in one file. The parts of a tensor
do not overlap and leave nothing out, so a reader of any world size finds the elements that it wants. Nothing here
touches a tensor or a file.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from zero.plan.cut import Box, box_error

VERSION = 2  # written where a tensor lies in boxes; else what a reader of version 1 knows
CHUNK = 1 << 20  # bytes that share one checksum; a reader of a part of a part reads less than this too much at each end
ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}
ITEMSIZE["bool"] = 1
Line = list[Any]  # of a chunk: kind, name, dtype, shape, boxes, signed, start, numel, file, offset, checksums, as JSON
_SUM = ',"crc32":'  # as it stands before the checksum of an index; inside of text its quotes would be escaped


class Damaged(ValueError):
    """What is wrong with an index, or with a checkpoint that does not hold what its index says."""


class Part(NamedTuple):
    """Elements [start, start + numel) of a flattened tensor, from byte `offset` of `file` on.

    crc32: the CRC-32 of zlib of each CHUNK bytes, the last perhaps of fewer; None where nobody has counted one.
    """

    start: NonNegativeInt
    numel: NonNegativeInt
    file: Annotated[str, Field(pattern="^[^/]*$")]
    offset: NonNegativeInt
    crc32: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Stored:
    """A tensor in files.

    boxes: where it was saved cut along dims: the boxes that make it up. Parts are ranges of the elements of these, one
           box after the other; of the flattened tensor where there are none.
    """

    dtype: Literal["fp64", "fp32", "bf16", "fp16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    boxes: tuple[Box, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of all parts."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.numel * ITEMSIZE[self.dtype]

    def cover(self, start: int, numel: int) -> Iterator[tuple[Part, int, int]]:
        """The parts that hold elements of [start, start + numel), with first element (of the tensor) and count."""
        for part in self.parts:
            first = max(part.start, start)
            count = min(part.start + part.numel, start + numel) - first
            if count > 0:
                yield part, first, count

    def gaps(self) -> str | None:
        """Which elements no part or more than one holds, or None."""
        end = 0
        for part in sorted(self.parts):
            if part.start != end:
                return f"elements {min(end, part.start)} to {max(end, part.start)}"
            end += part.numel
        if end != self.numel:
            return f"elements {end} to {self.numel}"
        return box_error(self.shape, self.boxes)


@dataclass(frozen=True)
class SavedParameter:
    """One parameter and the state of the optimizer behind it.

    weight:  as the model computes with it.
    master:  the exact values, fp32, or the int16 remainders that `zero.kernels.remainder` makes them of; None where
             the weight is exact.
    moments: by torch's name of the state; those in uint8 have `scales` of the same name, fp32, one for 256 elements.
             Under "rows" these are NorMuon's mean squares, one for each row.
    numbers: single numbers of the state, "step" among them.
    group:   which parameter group trains it; None for a frozen one.
    """

    weight: Stored
    master: Stored | None = None
    moments: Mapping[str, Stored] = field(default_factory=dict)
    scales: Mapping[str, Stored] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    group: int | None = None

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """All of them, with what they are: "weight", "master", the name of a moment, "scales." and that name."""
        yield "weight", self.weight
        if self.master is not None:
            yield "master", self.master
        yield from self.moments.items()
        for name, stored in self.scales.items():
            yield f"scales.{name}", stored


@dataclass(frozen=True)
class Index:
    """All that one checkpoint holds.

    save:    tells this save from every other of the same tag; part of the names of its files.
    tied:    other names of parameters -> the one that they are stored by.
    buffers: of rank 0, those that are in a state_dict.
    tensors: what `shared`, `ranks` and `client` refer to.
    files:   name -> bytes.
    ranks:   what each rank keeps for itself (random numbers, buffers that differ), by rank.
    signed:  name of a moment -> whether it can be negative, which says what codes of 8 bit mean.
    rotates: whether a later save may delete it to keep their number.
    excluded: frozen parameters that were left out on purpose (`exclude_frozen_parameters`).
    stripped: masters and moments were there once and were deleted to save room (`zero.checkpoint.keep_optimizer`).
    """

    save: str
    tag: str
    parameters: Mapping[str, SavedParameter]
    files: Mapping[str, int]
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, Stored] = field(default_factory=dict)
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    shared: Any = None
    ranks: tuple[Any, ...] = ()
    client: Any = None
    signed: Mapping[str, bool] = field(default_factory=dict)
    config: Any = None
    versions: Mapping[str, str] = field(default_factory=dict)
    rotates: bool = True
    excluded: tuple[str, ...] = ()
    stripped: bool = False

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return len(self.ranks)

    def tensors_by_kind(self) -> Iterator[tuple[str, str, Stored]]:
        """Every tensor, with its kind, as files have it, and its name."""
        for name, parameter in self.parameters.items():
            for kind, stored in parameter.tensors():
                yield kind, name, stored
        for kind, tensors in (("buffer", self.buffers), ("tensor", self.tensors)):
            for name, stored in tensors.items():
                yield kind, name, stored

    def stored(self) -> Iterator[tuple[str, Stored]]:
        """Every tensor, with a name for messages."""
        for kind, name, stored in self.tensors_by_kind():
            of = " " if kind in ("buffer", "tensor") else " of "
            yield f"{kind.replace('.', ' of ')}{of}'{name}'", stored

    def problems(self) -> list[str]:
        """Why this is no whole checkpoint, as far as the index alone tells; empty for a whole one."""
        problems = []
        for what, stored in self.stored():
            if gap := stored.gaps():
                problems.append(f"{what}: {gap} of {stored.numel} are missing or there twice")
            for part in stored.parts:
                size = self.files.get(part.file)
                end = part.offset + part.numel * ITEMSIZE[stored.dtype]
                if size is None or end > size:
                    problems.append(f"{what}: bytes up to {end} of {part.file}, which has {size}")
        return problems

    def to_json(self) -> str:
        """As text; `of_json` reads it. The last key is the CRC-32 of all bytes before it."""
        version = VERSION if any(stored.boxes for _, stored in self.stored()) else 1
        values = {"format": "zero", "version": version, **_INDEX.dump_python(self, exclude={"parameters"})}
        parameters = _PARAMETERS.dump_python(self.parameters, exclude_defaults=True)
        values["parameters"] = {name: {"group": None, **parameter} for name, parameter in parameters.items()}
        text = json.dumps(values, allow_nan=False, separators=(",", ":"))[:-1]
        return f"{text}{_SUM}{zlib.crc32(text.encode())}}}"

    @classmethod
    def of_json(cls, text: str | bytes, where: str) -> Index:
        """Raises Damaged, naming `where`, for a text that is not an index of this version, or not as it was written."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise Damaged(f"{where} is not JSON ({error}); take another checkpoint") from None
        if not isinstance(values, dict) or values.get("format") != "zero":
            raise Damaged(f"{where} is not the index of a checkpoint of zero")
        if values.get("version") not in range(1, VERSION + 1):
            raise Damaged(f"{where} has format version {values.get('version')!r}; this zero reads 1 to {VERSION}")
        _check_sum(text, values, where)
        gone = {each.name for each in fields(cls)} - {"excluded", "stripped"} - values.keys()
        if gone:
            raise Damaged(f"{where} is damaged: it has no {', '.join(sorted(gone))}")
        try:
            return _INDEX.validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise Damaged(f"{where} is damaged: {place}: {first['msg']}, got {first['input']!r:.80}") from None


def _check_sum(text: str | bytes, values: Mapping[str, Any], where: str) -> None:
    """What has changed on the disk may still be JSON, with another step, another learning rate or another place."""
    if "crc32" not in values:
        return
    body, separator, _ = (text.encode() if isinstance(text, str) else text).rpartition(_SUM.encode())
    if not separator or zlib.crc32(body) != values["crc32"]:
        raise Damaged(
            f"{where} is not what was saved (its checksum is another); take another checkpoint or, where you have "
            "changed it yourself, take its key 'crc32' out"
        )


def file_name(kind: str, rank: int, world_size: int, save: str) -> str:
    """The name of a rank's file of one kind; `save` keeps it apart from those of an earlier save of the tag."""
    return f"{kind}-{rank:05d}-of-{world_size:05d}.{save}.safetensors"


def assemble(lines: Iterable[Line], known: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any]) -> Index:
    """The index of everything that `lines` of all ranks say.

    known:  for each parameter its "group", "numbers", "dtype" and "shape".
    values: the other fields of `Index`; "signed", too, where lines do not say it.
    """
    by_kind: dict[str, dict[str, Stored]] = {}
    begins: dict[tuple[str, str, tuple[Box, ...]], int] = {}  # of a tensor's boxes on one rank, among all its boxes
    signed: dict[str, bool] = {}
    for kind, name, dtype, shape, boxes, signs, start, numel, file, offset, sums in lines:
        tensors = by_kind.setdefault(kind, {})
        stored = tensors.get(name, Stored(dtype, tuple(shape), ()))
        of_rank = tuple(Box(tuple(first), tuple(sizes)) for first, sizes in boxes)
        if (kind, name, of_rank) not in begins:
            begins[kind, name, of_rank] = sum(box.numel for box in stored.boxes)
            stored = replace(stored, boxes=stored.boxes + of_rank)
        part = Part(begins[kind, name, of_rank] + start, numel, file, offset, tuple(sums))
        tensors[name] = replace(stored, parts=tuple(sorted((*stored.parts, part))))
        if signs is not None:
            signed[kind] = signs
    weights, masters = by_kind.pop("weight", {}), by_kind.pop("master", {})
    buffers, tensors = by_kind.pop("buffer", {}), by_kind.pop("tensor", {})
    scales = {kind.removeprefix("scales."): by_kind.pop(kind) for kind in list(by_kind) if kind.startswith("scales.")}
    parameters = {
        name: SavedParameter(
            weight=weights.get(name, Stored(more["dtype"], tuple(more["shape"]), ())),  # one without elements
            master=masters.get(name),
            moments={kind: tensors[name] for kind, tensors in by_kind.items() if name in tensors},
            scales={kind: tensors[name] for kind, tensors in scales.items() if name in tensors},
            numbers=more["numbers"],
            group=more["group"],
        )
        for name, more in known.items()
    }
    return Index(parameters=parameters, buffers=buffers, tensors=tensors, **{"signed": signed, **values})


_INDEX = TypeAdapter(Index)
_PARAMETERS = TypeAdapter(dict[str, SavedParameter])
