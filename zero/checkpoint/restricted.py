"""The reader of files of torch.save that others wrote, the only one of pickled objects in this package.

torch's restricted unpickler builds tensors, plain containers, and the classes that it is told of; those here only keep
what was in the file. Nothing that a file names is imported or called beyond that.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from pickle import UnpicklingError  # what torch raises; nothing is read with this module
from typing import Any

import torch


class Refused(ValueError):
    """A file that holds what is not read."""


class Kept:
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
_STANDING = [(type(name.rpartition(".")[2], (Kept,), {}), name) for name in _NAMES]


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
