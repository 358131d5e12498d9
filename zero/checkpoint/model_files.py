"""A model as others read it: one safetensors file, or the files and the index of the Hugging Face layout.

Out of a checkpoint it takes a few MiB of memory, also for the largest tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from zero.checkpoint.folder import publish, read_index, sync
from zero.checkpoint.reader import Reader, grouped
from zero.checkpoint.safe_file import DTYPES, TensorChunk, write
from zero.checkpoint.staging import LazyTensor
from zero.checkpoint.verify import check_headers
from zero.config.values import Nbytes

NAME = "model.safetensors"
LIMIT = 5_000_000_000  # bytes of a file in the layout of Hugging Face, as their library has it


def size_of(value: int | str, what: str) -> int:
    """A number of bytes, perhaps as "5GB" (1000 MB) or "5GiB"; raises ValueError, naming `what`."""
    try:
        return TypeAdapter(Nbytes).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{what}: got {value!r}, wanted {error.errors()[0]['msg']}") from None


def write_model(
    folder: Path,
    name: str,
    chunks: Sequence[TensorChunk],
    tied: Mapping[str, str],
    limit: int | None,
    moved: Callable[[int], None] = id,
) -> list[Path]:
    """Write whole tensors into `folder`, and return the files with tensors.

    name:  of the file, with the suffix .safetensors.
    tied:  other names of tensors -> the name among `chunks`; they go into the metadata.
    limit: None for one file. Else the most bytes of a file, as far as single tensors are not larger, and the layout
           of Hugging Face: where one file is enough, it is `name`; else name-00001-of-0000N.safetensors and so on, and
           name.safetensors.index.json. Files of an earlier model of that name that this one does not have go away.
    Raises OSError and what chunks raise; nothing that this call wrote is there then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cut = [list(chunks)] if limit is None else grouped(chunks, lambda chunk: chunk.values.nbytes, limit)
    stem = name.removesuffix(".safetensors")
    many = len(cut) > 1
    names = [f"{stem}-{number:05d}-of-{len(cut):05d}.safetensors" for number in range(1, len(cut) + 1)]
    paths = [folder / (numbered if many else name) for numbered in names]
    index = folder / f"{name}.index.json"
    if limit is not None:  # so that a reader never sees an index with files of two models
        index.unlink(missing_ok=True)
    done: list[Path] = []
    try:
        for path, some in zip(paths, cut, strict=True):
            inside = {chunk.name for chunk in some}
            write(path, some, {other: one for other, one in tied.items() if one in inside}, moved)
            done.append(path)
    except BaseException:
        for path in done:
            path.unlink(missing_ok=True)
        raise
    if many:
        publish(index, _index(paths, cut))
    if limit is not None:
        ours = re.compile(re.escape(stem) + r"(-\d{5}-of-\d{5})?\.safetensors")
        for path in list(folder.iterdir()):
            if ours.fullmatch(path.name) and path not in paths and path.is_file():
                path.unlink()
    sync(folder)
    return paths


def _index(paths: Sequence[Path], cut: Sequence[Sequence[TensorChunk]]) -> str:
    total = sum(chunk.values.nbytes for some in cut for chunk in some)
    where = {chunk.name: path.name for path, some in zip(paths, cut, strict=True) for chunk in some}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"


def consolidate(
    folder: Path,
    out: Path,
    dtype: str = "fp32",
    limit: int | None = None,
    hf: bool = False,
    progress: Callable[[int], Callable[[int], None]] = lambda total: id,
) -> list[Path]:
    """Write the model of the checkpoint `folder`; returns the files.

    out:      a file whose name ends in .safetensors; any other name, or `hf`, makes it a folder in the layout of
              Hugging Face, with files of at most `limit` bytes (default 5 GB).
    dtype:    of floating-point parameters. "fp32" gives the exact values, from masters where there are any. Of "bf16"
              and "fp16", weights that the model computes with in that dtype stay as they are, and others are the exact
              values, rounded to nearest, ties to even. Buffers and parameters of integers stay as they are.
    progress: told the number of bytes of all tensors; gives what is told how many more have been written.
    Raises Damaged for a checkpoint that is not whole, and OSError.
    """
    single = out.suffix == ".safetensors" and not hf
    index = read_index(folder)
    with Reader(folder, index) as reader:
        chunks = model_chunks(reader, dtype)
        moved = progress(sum(chunk.values.nbytes for chunk in chunks))
        if single:
            return write_model(out.parent, out.name, chunks, index.tied, None, moved)
        return write_model(out, NAME, chunks, index.tied, limit or LIMIT, moved)


def model_chunks(reader: Reader, dtype: str) -> list[TensorChunk]:
    """Parameters and buffers, whole, each read when it is written. Raises Damaged."""
    check_headers(reader.folder, reader.index)
    chunks = []
    for name, parameter in reader.index.parameters.items():
        stored = parameter.weight
        kind = DTYPES[stored.dtype]
        if not kind.is_floating_point or (stored.dtype == dtype and (dtype != "fp32" or parameter.master is None)):
            of = partial(reader.read, stored, what=f"weight of '{name}'")
        else:
            kind, of = DTYPES[dtype], partial(_exact, reader, name)
        chunks.append(TensorChunk("weight", name, 0, stored.shape, LazyTensor(kind, stored.numel, of)))
    for name, stored in reader.index.buffers.items():
        values = LazyTensor(DTYPES[stored.dtype], stored.numel, partial(reader.read, stored, what=f"buffer '{name}'"))
        chunks.append(TensorChunk("buffer", name, 0, stored.shape, values))
    return chunks


def _exact(reader: Reader, name: str, start: int, numel: int) -> torch.Tensor:
    values: list[torch.Tensor] = []
    reader.exact(name, start, numel, values.append)
    reader.finish()
    return values[0]
