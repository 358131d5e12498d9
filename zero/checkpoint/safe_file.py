"""Files in the safetensors format, written from where tensors lie and read range by range, with checksums.

The format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian length, a JSON header, and the
tensors without gaps. The library writes from bytes that it wants all at once and has no checksums; it reads what is
written here.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero.checkpoint.index import CHUNK, Damaged, Index, Part, Stored
from zero.checkpoint.staging import LazyTensor, Staging
from zero.kernels.crc32 import crc32, crc32_read
from zero.plan.cut import Box

# Our names of dtypes, torch's, and those of safetensors.
_TABLE = (
    ("fp64", torch.float64, "F64"),
    ("fp32", torch.float32, "F32"),
    ("bf16", torch.bfloat16, "BF16"),
    ("fp16", torch.float16, "F16"),
    ("int64", torch.int64, "I64"),
    ("int32", torch.int32, "I32"),
    ("int16", torch.int16, "I16"),
    ("int8", torch.int8, "I8"),
    ("uint8", torch.uint8, "U8"),
    ("bool", torch.bool, "BOOL"),
)
DTYPES = {name: dtype for name, dtype, _ in _TABLE}
NAMES = {dtype: name for name, dtype, _ in _TABLE}
_SAFE = {name: safe for name, _, safe in _TABLE}
_OF_SAFE = {safe: name for name, _, safe in _TABLE}
_BEHIND = 32 * CHUNK  # bytes after which the kernel is told to begin to write them
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, do not wait; errors stay for fsync to report
_PAGE = 4096
_METADATA = {"format": "pt"}
_LARGEST_HEADER = 100_000_000  # bytes; as in the library


def dtype_name(dtype: torch.dtype) -> str:
    """Our name, or torch's of a dtype that no file holds."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


class TensorChunk(NamedTuple):
    """Elements from `start` on of a tensor that has `shape` as a whole, or of those of its `boxes` that a rank holds.

    values: contiguous [n], on any device; or a LazyTensor that gives them when they are written.
    signed: of a moment, whether it can be negative.
    """

    kind: str
    name: str
    start: int
    shape: tuple[int, ...]
    values: torch.Tensor | LazyTensor
    boxes: tuple[Box, ...] = ()
    signed: bool | None = None

    @property
    def key(self) -> str:
        """Its name in a file."""
        return _key(self.kind, self.name, self.shape, self.start, self.values.numel(), self.boxes)


def _key(kind: str, name: str, shape: Sequence[int], start: int, numel: int, boxes: Sequence[Box]) -> str:
    """The name of a tensor where a part is all of it, else with the range of elements, in the box where they begin."""
    name = name if kind in ("weight", "buffer", "tensor") else f"{kind}/{name}"
    for box in boxes:
        if start < box.numel:
            return f"{name}[{','.join(map(str, box.offset))}][{start}:{start + numel}]"
        start -= box.numel
    return name if numel == math.prod(shape) else f"{name}[{start}:{start + numel}]"


class Writing:
    """A file that is being written: its header first, then its chunks in any order, each once.

    `forms`: the chunks that there will be, whose values may be on the meta device. `moved` is told how many bytes more
    have been written. The file has its name, and is safe on the disk, after `finish` only. Raises OSError.
    """

    def __init__(
        self,
        path: Path,
        forms: Sequence[TensorChunk],
        metadata: Mapping[str, str] | None = None,
        moved: Callable[[int], object] = id,
        staging: Staging | None = None,
    ) -> None:
        order = sorted(forms, key=lambda chunk: -chunk.values.dtype.itemsize)  # so that each lies on its own multiple
        header, begins = _header(order, metadata or {})
        self.path = path
        self._beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._left = {chunk.key: len(header) + begin for chunk, begin in zip(order, begins, strict=True)}
        self._found: list[tuple[TensorChunk, Part]] = []
        self._moved = moved
        self._staging = staging or Staging()
        self._dirty = 0  # bytes that the kernel has not been told to write
        self.nbytes = len(header) + sum(chunk.values.nbytes for chunk in order)
        self._file = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            _write_all(self._file, memoryview(header), 0)
        except BaseException:
            self.discard()
            raise

    def put(self, chunk: TensorChunk) -> None:
        """Write one chunk, of the dtype and size of its form."""
        begin = offset = self._left.pop(chunk.key)
        sums = []
        for block in self._staging.blocks(chunk.values):
            for at in range(0, block.nbytes, CHUNK):  # while it is in the cache: first counted, then copied
                data = block[at : at + CHUNK]
                sums.append(crc32(data))
                _write_all(self._file, data, offset)
                offset += data.nbytes
                self._dirty += data.nbytes
                self._moved(data.nbytes)
                if self._dirty >= _BEHIND:
                    # The kernel begins to write, where it can, so that the sync at the end finds little to do.
                    if (begin_writing := _sync_file_range()) is not None:
                        begin_writing(self._file, 0, 0, _WRITE)  # 0 bytes: up to the end
                    self._dirty = 0
        part = Part(chunk.start, chunk.values.numel(), self.path.name, begin, tuple(sums))
        self._found.append((chunk, part))

    def finish(self) -> list[tuple[TensorChunk, Part]]:
        """Sync the file and give it its name; returns where each chunk lies."""
        os.fsync(self._file)
        os.close(self._file)
        self._file = -1
        os.replace(self._beside, self.path)
        self._moved(1)
        return self._found

    def discard(self) -> None:
        """Let go of the file, and of what is written unless it has its name already."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._beside.unlink(missing_ok=True)


def write(
    path: Path,
    chunks: Sequence[TensorChunk],
    metadata: Mapping[str, str] | None = None,
    moved: Callable[[int], object] = id,
) -> list[tuple[TensorChunk, Part]]:
    """Write one file, sync it, and give it its name only then; returns where each chunk lies.

    `moved` is told how many bytes more have been written. Raises OSError; the file is not there then.
    """
    writing = Writing(path, chunks, metadata, moved)
    try:
        for chunk in chunks:
            writing.put(chunk)
        return writing.finish()
    finally:
        writing.discard()


def _header(chunks: Sequence[TensorChunk], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """The bytes before the first tensor, and the first byte of each tensor behind them."""
    entries: dict[str, Any] = {"__metadata__": {**_METADATA, **metadata}}
    begins, end = [], 0
    for chunk in chunks:
        values, name = chunk.values, chunk.key
        shape = chunk.shape if values.numel() == math.prod(chunk.shape) else (values.numel(),)
        begins.append(end)
        end += values.nbytes
        if values.dtype not in NAMES:
            raise ValueError(f"'{name}' is {dtype_name(values.dtype)}; a file holds {', '.join(DTYPES)}")
        safe = _SAFE[NAMES[values.dtype]]
        if name in entries:
            raise ValueError(f"two tensors of one file are named '{name}'")
        entries[name] = {"dtype": safe, "shape": list(shape), "data_offsets": [begins[-1], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)  # the tensors begin on a page
    return len(text).to_bytes(8, "little") + text, begins


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def read_part(file: int, part: Part, skip: int, target: memoryview, size: int, what: str) -> None:
    """Bytes from `skip` of the part (elements of `size` bytes) on into `target`; raises Damaged.

    Chunks that are wanted whole go straight to their place; one that is wanted in part is read and checked beside it.
    """
    total, last, position = part.numel * size, skip + target.nbytes, 0
    while position < target.nbytes:
        chunk, inside = divmod(skip + position, CHUNK)
        begin = chunk * CHUNK
        end = last if last == total else last // CHUNK * CHUNK
        if inside or end <= begin:
            end = min(begin + CHUNK, total)
        if part.crc32 is None:  # nothing to check, so exactly what is wanted
            begin, inside, end = begin + inside, 0, last
        place = target[position : position + min(end - begin - inside, target.nbytes - position)]
        data = place if place.nbytes == end - begin else memoryview(bytearray(end - begin))
        read = crc32_read if part.crc32 is not None else _read_unchecked
        try:
            got, sums = read(file, part.offset + begin, data, CHUNK)
        except OSError as error:
            raise Damaged(f"{what}: {part.file} cannot be read: {error.strerror}") from None
        if got < data.nbytes:
            raise Damaged(f"{what}: {part.file} ends at byte {part.offset + begin + got}, inside of it")
        for number, crc in enumerate(sums, chunk):
            if crc != part.crc32[number]:
                span = f"bytes {part.offset + number * CHUNK} to {part.offset + min((number + 1) * CHUNK, total)}"
                raise Damaged(f"{what}: {span} of {part.file} are not what was saved (their checksum is another)")
        if data is not place:
            place[:] = data[inside : inside + place.nbytes]
        position += place.nbytes


def _read_unchecked(file: int, offset: int, data: memoryview, chunk: int) -> tuple[int, list[int]]:
    """As `crc32_read`, without checksums."""
    got = 0
    while got < data.nbytes and (count := os.preadv(file, [data[got:]], offset + got)):
        got += count
    return got, []


def contents(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """What a safetensors file holds, each tensor as one part without a checksum, and the metadata beside them.

    Raises Damaged for a file that is not one, or is shorter than its header says.
    """
    size = path.stat().st_size
    if not path.is_file():  # a pipe would be waited for
        raise Damaged(f"{path} is no file")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise Damaged(f"{path} is no safetensors file: its header would have {length} bytes, the file has {size}")
        try:
            entries = json.loads(file.read(length))
            metadata = dict(entries.pop("__metadata__", None) or {})
            tensors = {name: _entry(path, 8 + length, entry) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise Damaged(f"{path} is no safetensors file: {type(error).__name__}: {error}") from None
    for name, stored in tensors.items():
        if stored.parts[0].offset + stored.nbytes > size:
            raise Damaged(f"{path} is cut short: it has {size} bytes, and '{name}' ends behind them")
    return tensors, metadata


def header_problem(path: Path, wanted: Mapping[str, Stored], stripped: bool) -> str | None:
    """What of the header of a checkpoint's file is not as it was saved; `wanted` is of `headers`. Raises OSError.

    stripped: tensors of the optimizer may be there that the index has no more.
    """
    try:
        tensors, metadata = contents(path)
    except Damaged as error:
        return str(error)
    if metadata != _METADATA:
        return f"the header of {path.name} has the metadata {metadata}, not {_METADATA}"
    for name, stored in wanted.items():
        if tensors.get(name) != stored:
            here = _place(tensors[name]) if name in tensors else "nothing"
            return f"the header of {path.name} has {here} as '{name}', not {_place(stored)}"
    if (more := tensors.keys() - wanted.keys()) and not stripped:
        return f"the header of {path.name} has '{min(more)}', and the index does not"
    return None


def headers(index: Index, files: Iterable[str]) -> dict[str, dict[str, Stored]]:
    """What the header of each of these files of a checkpoint has, as `contents` gives it."""
    found: dict[str, dict[str, Stored]] = {file: {} for file in files}
    for kind, name, stored in index.tensors_by_kind():
        for part in stored.parts:
            if part.file in found:
                shape = stored.shape if part.numel == stored.numel else (part.numel,)
                key = _key(kind, name, stored.shape, part.start, part.numel, stored.boxes)
                found[part.file][key] = Stored(stored.dtype, shape, (part._replace(start=0, crc32=None),))
    return found


def _place(stored: Stored) -> str:
    return f"{stored.dtype} {list(stored.shape)} from byte {stored.parts[0].offset} on"


def _entry(path: Path, base: int, entry: dict[str, Any]) -> Stored:
    if entry["dtype"] not in _OF_SAFE:
        raise ValueError(f"dtype {entry['dtype']}, which is not one of {', '.join(_OF_SAFE)}")
    begin, end = entry["data_offsets"]
    stored = Stored(_OF_SAFE[entry["dtype"]], tuple(entry["shape"]), ())
    if end - begin != stored.nbytes or begin < 0:
        raise ValueError(f"{end - begin} bytes for shape {stored.shape}")
    return replace(stored, parts=(Part(0, stored.numel, path.name, base + begin),))
