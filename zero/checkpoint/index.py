"""The index of a checkpoint: which elements of which tensor lie where in which file, and all that is no tensor.

Words: a *tensor* is whole, as a model knows it; a *part* is a range of its elements in one file. The parts of a tensor
do not overlap and leave nothing out, so a reader of any world size finds the elements that it wants. Nothing here
touches a tensor or a file.
"""

from __future__ import annotations

import json
import math
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from reprlib import Repr
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, with_config
from typing_extensions import NotRequired, TypedDict

from zero.plan.cut import Box, cover_error

VERSION = 2  # written where a tensor lies in boxes; else what a reader of version 1 knows
CHUNK = 1 << 20  # bytes that share one checksum; a reader of a part of a part reads less than this too much at each end
ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}
ITEMSIZE["bool"] = 1
Line = list[Any]  # of a chunk: kind, name, dtype, shape, boxes, signed, start, numel, file, offset, checksums, as JSON
FILE = r"([a-z]+)-([0-9]{5,})-of-([0-9]{5,})\.([0-9a-f]{8})\.safetensors"  # of `file_name`
MOST = 1 << 63  # bytes, elements, counts are below it
_MISSING = "are missing or there twice"
_SUM = ',"crc32":'  # as it stands before the checksum of an index; inside of text its quotes would be escaped


class Damaged(ValueError):
    """An index that is wrong, or a checkpoint that does not hold what its index says."""


def _small(box: Box) -> Box:
    if any(number >= MOST for number in (*box.offset, *box.sizes)):
        raise ValueError(f"wanted numbers below {MOST}")
    return box


Count = Annotated[int, Field(ge=0, lt=MOST)]
FileName = Annotated[str, Field(pattern=f"^{FILE}$")]
Sizes = Annotated[tuple[Count, ...], Field(max_length=64)]  # as many dims as torch has
Crc32 = Annotated[int, Field(ge=0, lt=1 << 32)]


class Part(NamedTuple):
    """Elements [start, start + numel) of a flattened tensor, from byte `offset` of `file` on.

    crc32: the CRC-32 of zlib of each CHUNK bytes, the last perhaps of fewer; None where nobody has counted one.
    """

    start: Count
    numel: Count
    file: FileName
    offset: Count
    crc32: tuple[Crc32, ...] | None = None


@dataclass(frozen=True)
class Stored:
    """A tensor in files.

    parts: in order.
    boxes: where it was saved cut along dims: the boxes that make it up. Parts are ranges of the elements of these, one
           box after the other; of the flattened tensor where there are none.
    """

    dtype: Literal["fp64", "fp32", "bf16", "fp16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    shape: Sizes
    parts: tuple[Part, ...]
    boxes: tuple[Annotated[Box, AfterValidator(_small)], ...] = ()

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
        begin = bisect_right(self.parts, start, key=lambda part: part.start + part.numel)
        for index in range(begin, len(self.parts)):
            part = self.parts[index]
            first = max(part.start, start)
            count = min(part.start + part.numel, start + numel) - first
            if part.start >= start + numel:
                return
            if count > 0:
                yield part, first, count

    def problem(self, sizes: Mapping[str, int]) -> str | None:
        """Why its elements are not all there, once and with checksums, in files of these `sizes`, or None."""
        if math.prod(max(1, size) for size in self.shape) >= MOST:
            return f"a tensor of shape {self.shape} has too many elements"
        end = 0
        for part in self.parts:
            if part.start != end:
                return f"elements {min(end, part.start)} to {max(end, part.start)} of {self.numel} {_MISSING}"
            end += part.numel
            nbytes, size = part.numel * ITEMSIZE[self.dtype], sizes.get(part.file)
            if size is None or part.offset + nbytes > size:
                return f"bytes up to {part.offset + nbytes} of {part.file}, which has {size}"
            if len(part.crc32 or ()) != -(-nbytes // CHUNK):
                return f"{part.file} has {len(part.crc32 or ())} checksums of its {nbytes} bytes there"
        if end != self.numel:
            return f"elements {min(end, self.numel)} to {max(end, self.numel)} of {self.numel} {_MISSING}"
        return cover_error(self.shape, self.boxes) if self.boxes else None


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
    numbers: Mapping[str, FiniteFloat] = field(default_factory=dict)
    group: Count | None = None

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """All of them, with what they are: "weight", "master", the name of a moment, "scales." and that name."""
        yield "weight", self.weight
        if self.master is not None:
            yield "master", self.master
        yield from self.moments.items()
        for name, stored in self.scales.items():
            yield f"scales.{name}", stored


@with_config(ConfigDict(extra="allow"))
class Shared(TypedDict):
    """The state that all ranks have alike, as JSON; checkpoints of other programs have only the number of steps."""

    global_steps: Count
    state: NotRequired[Any]
    extra_state: NotRequired[Any]


@with_config(ConfigDict(extra="forbid"))
class OfRank(TypedDict, total=False):
    """The state of one rank.

    buffers: those that are not as on rank 0 -> names among `Index.tensors`; state: random numbers, as JSON.
    """

    buffers: dict[str, str]
    state: Any


@dataclass(frozen=True)
class Index:
    """All that one checkpoint holds.

    save:    tells this save from every other of the same tag; part of the names of its files.
    tied:    other names of parameters -> the one that they are stored by.
    buffers: of rank 0, those that are in a state_dict.
    tensors: what `shared`, `ranks` and `client` refer to.
    files:   name -> bytes.
    ranks:   what each rank keeps for itself, by rank.
    signed:  name of a moment -> whether it can be negative, which says what codes of 8 bit mean.
    rotates: whether a later save may delete it to keep their number.
    excluded: frozen parameters that were left out on purpose (`exclude_frozen_parameters`).
    stripped: masters and moments were there once and were deleted to save room (`zero.checkpoint.keep_optimizer`).
    """

    save: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]
    tag: str
    parameters: Mapping[str, SavedParameter]
    files: Mapping[FileName, Count]
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, Stored] = field(default_factory=dict)
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    shared: Shared | None = None
    ranks: tuple[OfRank | None, ...] = ()
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
            values = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{where} is not JSON ({error}); take another checkpoint") from None
        if not isinstance(values, dict) or values.get("format") != "zero":
            raise Damaged(f"{where} is not the index of a checkpoint of zero")
        if type(values.get("version")) is not int or not 1 <= values["version"] <= VERSION:
            raise Damaged(
                f"{where} has format version {_BRIEF.repr(values.get('version'))}; this zero reads 1 to {VERSION}"
            )
        _check_sum(text, values, where)
        gone = {each.name for each in fields(cls)} - {"excluded", "stripped"} - values.keys()
        if gone:
            raise Damaged(f"{where} is damaged: it has no {', '.join(sorted(gone))}")
        try:
            return _INDEX.validate_python(values)
        except ValidationError as error:
            raise Damaged(f"{where} is damaged: {first_error(error)}") from None


def first_error(error: ValidationError) -> str:
    """The first place at which something else was wanted, what, and what is there."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {_BRIEF.repr(first['input'])}"


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


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


_BRIEF = Repr()  # of what may be long or deep
_BRIEF.maxstring = _BRIEF.maxother = 80
_INDEX = TypeAdapter(Index)
_PARAMETERS = TypeAdapter(dict[str, SavedParameter])
