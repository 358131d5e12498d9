"""Files of torch.save that others wrote: read without running code, or range by range as safetensors files are.

They are the only pickled objects that this package reads. torch's restricted unpickler builds tensors, plain
containers, and the classes that it is told of; those here only keep what was in the file. Nothing that a file names is
imported or called beyond that.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError  # what torch raises; nothing is read with this module
from typing import Any

import torch

from zero.checkpoint.index import Damaged, Part, Stored
from zero.checkpoint.safe_file import DTYPES, NAMES, dtype_name

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class Refused(ValueError):
    """A file that holds what is not read."""


class StandIn:
    """Stands for an object of DeepSpeed: what it was made of, and its attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args


# A class may stand for several names, but torch wants one class for each name that it is told of.
_NAMES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_STANDING = [(type(name.rpartition(".")[2], (StandIn,), {}), name) for name in _NAMES]


def load(path: Path) -> Any:
    """What a file holds, tensors on the CPU and mapped from the file.

    Raises Refused, naming the class, for a file with any other object than tensors, plain containers, and those few of
    DeepSpeed, and for one that torch.save has not written; OSError.
    """
    if not zipfile.is_zipfile(path):
        path.stat()  # a missing file says so
        raise Refused(f"{path} is not a whole file of torch.save in its format since torch 1.6")
    try:
        with torch.serialization.safe_globals(_STANDING):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except UnpicklingError as error:
        raise Refused(f"{path} is refused: {_reason(str(error))}") from None
    except (RuntimeError, EOFError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise Refused(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def _reason(text: str) -> str:
    match = re.search(r"GLOBAL (\S+)", text)
    if match is None:
        return text.splitlines()[0]
    names = ", ".join(name.rpartition(".")[2] for name in _NAMES)
    return (
        f"it holds an object of {match[1]}; only tensors, plain containers and {names} of DeepSpeed "
        "are read, as others may run code. Leave it out where the file is saved"
    )


def contents(path: Path) -> dict[str, Stored]:
    """What a dictionary of tensors by name holds, each as one part without a checksum; no tensor is read.

    Raises Damaged for a file that holds anything else, `Refused` for one that could run code, OSError.
    """
    state = load(path)
    if not isinstance(state, Mapping):
        raise Damaged(f"{path} holds a {type(state).__name__}; wanted a dictionary of tensors by name")
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or not isinstance(name, str):
            raise Damaged(
                f"{path} holds a {type(value).__name__} as {name!r}; wanted tensors by name, as torch.save(model."
                "state_dict(), file) writes them"
            )
        dense = value.layout is torch.strided
        if not dense or value.dtype not in NAMES or not value.is_contiguous():
            how = "not contiguous" if dense else str(value.layout).removeprefix("torch.")
            how = how if value.dtype in NAMES else dtype_name(value.dtype)
            raise Damaged(f"{path}: '{name}' is {how}; wanted a dense, contiguous tensor of {', '.join(DTYPES)}")
    offsets = _offsets(path, state)
    stored = {}
    for name, value in state.items():
        begin = offsets.get(value.untyped_storage().data_ptr(), 0) + value.storage_offset() * value.itemsize
        part = Part(0, value.numel(), path.name, begin)
        stored[name] = Stored(NAMES[value.dtype], tuple(value.shape), (part,))
    return stored


def _offsets(path: Path, state: Mapping[str, torch.Tensor]) -> dict[int, int]:
    """For each memory that tensors share, the byte of the file at which it begins; it is mapped from there."""
    storages = [value.untyped_storage() for value in state.values()]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    records = _records(path)
    found = sorted(sizes.items())
    # The file is mapped as one piece, so that both have one order and one distance.
    if [size for _, size in found] == [size for _, size in records]:
        offsets = {memory: offset for (memory, _), (offset, _) in zip(found, records, strict=True)}
        if len({memory - offset for memory, offset in offsets.items()}) <= 1:
            return offsets
    raise Damaged(f"{path} holds more than the tensors that it names, or not as torch.save writes them")


def _records(path: Path) -> list[tuple[int, int]]:
    """First byte and number of bytes of each storage in the file, in order."""
    found = []
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            folder, _, name = info.filename.rpartition("/")
            if name == "byteorder" and archive.read(info).decode() != sys.byteorder:
                raise Damaged(f"{path} was written on a machine of another byte order; convert it to safetensors there")
            if folder.endswith("/data") and info.file_size:
                file.seek(info.header_offset + 26)  # of its own header, which may differ from that at the file's end
                name_length, extra_length = (int.from_bytes(file.read(2), "little") for _ in range(2))
                found.append((info.header_offset + 30 + name_length + extra_length, info.compress_size))
    return sorted(found)
