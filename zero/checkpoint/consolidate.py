"""One model in safetensors out of a checkpoint, in a few MiB of memory whatever the size of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from zero.checkpoint.folder import read_index
from zero.checkpoint.model_files import NAME, write_model
from zero.checkpoint.reader import Reader
from zero.checkpoint.safe_file import DTYPES, TensorChunk
from zero.checkpoint.staging import LazyTensor

LIMIT = 5_000_000_000  # bytes of a file in the layout of Hugging Face, as their library has it


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
    """Parameters and buffers, whole, each read when it is written."""
    chunks = []
    for name, parameter in reader.index.parameters.items():
        stored = parameter.weight
        kind = DTYPES[stored.dtype]
        if not kind.is_floating_point or (stored.dtype == dtype and (dtype != "fp32" or parameter.master is None)):
            values = LazyTensor(kind, stored.numel, partial(reader.read, stored, what=f"weight of '{name}'"))
        else:
            values = LazyTensor(DTYPES[dtype], stored.numel, partial(_exact, reader, name))
        chunks.append(TensorChunk("weight", name, 0, stored.shape, values))
    for name, stored in reader.index.buffers.items():
        values = LazyTensor(DTYPES[stored.dtype], stored.numel, partial(reader.read, stored, what=f"buffer '{name}'"))
        chunks.append(TensorChunk("buffer", name, 0, stored.shape, values))
    return chunks


def _exact(reader: Reader, name: str, start: int, numel: int) -> torch.Tensor:
    values: list[torch.Tensor] = []
    reader.exact(name, start, numel, values.append)
    reader.finish()
    return values[0]
