"""A stand-in for a GPU: the engine is to treat CPU tensors as those of a device for which the host must not wait.

`zero.kernels.cuda` finds kernels there. They are the host's, with the interface of `zero._cuda`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zero.kernels import cuda, native


class Kernels:
    """What of `zero._cuda` an engine calls."""

    def __init__(self) -> None:
        self._host = native.load()

    def step(self, formula, count, grad_scale, scale_address, shard, device, stream) -> None:
        scale = ctypes.c_double.from_address(scale_address).value if scale_address else grad_scale
        if not math.isnan(scale):
            self._host.step(formula, count, scale, shard, 1)

    def sum_squares(self, x, dtype, numel, scratch, out, accumulate, device, stream) -> None:
        there = ctypes.c_double.from_address(out)
        there.value = (there.value if accumulate else 0.0) + self._host.sum_squares(x, dtype, numel, 1)


# Each gives the host numbers of a device. On a CPU tolist() and numpy() dispatch nothing, so methods are replaced.
METHODS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")
OPERATORS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")
# Where numbers of the host are read: those that the hosts send each other, what has been sent to the host, and gloo's.
OF_THE_HOST = {"flags_of", "numbers", "scatter", "gather", "sum"}


class Waits(TorchDispatchMode):
    """Counts what would have the host wait for the device.

    found: where; sent: how many outcomes of steps were read; launches: of our kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.sent = self.launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in OPERATORS:
            self.note(func._schema.name)
        return func(*args, **(kwargs or {}))

    def note(self, what: str) -> None:
        """Somebody reads."""
        frames = [each for each in traceback.extract_stack() if "/zero/" in each.filename]
        if frames and frames[-1].name in OF_THE_HOST:
            self.sent += frames[-1].name == "numbers" and what == "tolist"
        elif frames:
            self.found.append(f"{what} in {frames[-1].filename.rpartition('/zero/')[2]}, {frames[-1].name}")


@contextlib.contextmanager
def stand_in() -> Iterator[Waits]:
    """Inside, CPU tensors are those of a GPU; gives the counter of waits."""

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            waits.note(name)
            return method(*args, **kwargs)

        return call

    def launch(call: Callable[..., Any], device: torch.device, *arguments: Any) -> None:
        waits.launches += 1
        call(*arguments, 0, 0)

    kernels, waits = Kernels(), Waits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "kernels", lambda device: kernels)
        patch.setattr(cuda, "launch", launch)
        for name in METHODS:
            patch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
        with waits:
            yield waits
