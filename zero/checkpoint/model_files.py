"""A model as others read it: one safetensors file, or the files and the index of the Hugging Face layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from zero.checkpoint.folder import publish, sync
from zero.checkpoint.safe_file import TensorChunk, write
from zero.config.values import Nbytes

NAME = "model.safetensors"


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
    cut = [list(chunks)] if limit is None else _cut(chunks, limit)
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


def _cut(chunks: Sequence[TensorChunk], limit: int) -> list[list[TensorChunk]]:
    files: list[list[TensorChunk]] = [[]]
    size = 0
    for chunk in chunks:
        if files[-1] and size + chunk.values.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(chunk)
        size += chunk.values.nbytes
    return files


def _index(paths: Sequence[Path], cut: Sequence[Sequence[TensorChunk]]) -> str:
    total = sum(chunk.values.nbytes for some in cut for chunk in some)
    where = {chunk.name: path.name for path, some in zip(paths, cut, strict=True) for chunk in some}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"
