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
from zero.core.torch_private import offset_in_file

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


def load(path: Path, device: str = "cpu") -> Any:
    """What a file holds, tensors on the CPU and mapped from the file, or on the meta device.

    Raises Refused, naming the class, for a file with any other object than tensors, plain containers, and those few of
    DeepSpeed, and for one that torch.save has not written; OSError.
    """
    if not zipfile.is_zipfile(path):
        path.stat()  # a missing file says so
        raise Refused(f"{path} is not a whole file of torch.save in its format since torch 1.6")
    try:
        with torch.serialization.safe_globals(_STANDING):
            return torch.load(path, map_location=device, mmap=True, weights_only=True)
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
    with zipfile.ZipFile(path) as archive:
        orders = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/byteorder")]
    if orders and orders[0] != sys.byteorder:
        raise Damaged(f"{path} was written on a machine of another byte order; convert it to safetensors there")
    stored, bases = {}, set()
    for name, there in load(path, "meta").items():
        part = Part(0, there.numel(), path.name, offset_in_file(there))
        stored[name] = Stored(NAMES[there.dtype], tuple(there.shape), (part,))
        if part.numel:
            bases.add(state[name].data_ptr() - part.offset)
    # torch maps the file as one piece, but reckons the bytes at which storages begin, as if it had written them.
    if len(bases) > 1:
        raise Damaged(f"{path} is not as torch.save writes it; load it and save it again")
    return stored
