"""The bandwidth of this machine for a given mix of reads and writes: csrc/tests/stream.cpp, compiled on the spot."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SOURCE = Path(__file__).parents[1] / "csrc" / "tests" / "stream.cpp"
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wall", "-Wextra"]


class Mix(NamedTuple):
    """The arrays that a kernel goes over once, all of one length: read, read and written back, only written."""

    reads: Sequence[Tensor] = ()
    updates: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes per element of each array: mixes with the same sizes have the same yardstick."""
        return tuple(tuple(sorted(tensor.itemsize for tensor in part)) for part in self)

    def nbytes(self) -> int:
        """Bytes per element that the kernel asks for; what a cache reads before it writes is not counted."""
        reads, updates, writes = (sum(part) for part in self.sizes())
        return reads + 2 * updates + writes


class _Array(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("itemsize", ctypes.c_int64))


class Yardstick:
    """The compiled loop."""

    def __init__(self) -> None:
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "stream.so"
            subprocess.run([*compiler, *FLAGS, str(SOURCE), "-o", str(library)], check=True)
            self._call = ctypes.CDLL(str(library)).zero_stream
        self._call.restype = ctypes.c_uint64

    def over(self, mix: Mix) -> Callable[[], None]:
        """The loop over the arrays of `mix`: reads and updates keep their values, writes become zeros."""
        parts = [
            ((_Array * len(part))(*[_Array(tensor.data_ptr(), tensor.itemsize) for tensor in part]), len(part))
            for part in mix
        ]
        numel = next(tensor.numel() for part in mix for tensor in part)
        arguments = [word for part in parts for word in part]
        arguments += [ctypes.c_int64(numel), ctypes.c_uint64(0), torch.get_num_threads()]
        return lambda: self._call(*arguments)
