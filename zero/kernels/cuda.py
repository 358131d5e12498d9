"""The CUDA kernels: which devices can run them, and the launch of each on torch's current stream.

Nothing here checks tensors (the callers do) and nothing waits for a device. Every launch goes to the stream that is
current when it is made, like torch's own operations, and so may be captured in a CUDA graph. A launch that fails raises
RuntimeError with the call and CUDA's text.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from zero.kernels.native import CUDA_MODULE, load

_THREADS_OF_PROBE = 32


@functools.cache
def _usable(index: int) -> ModuleType | None:
    """``zero._cuda`` if device `index` can run it: an old driver or an unknown chip fails only at the first launch."""
    module = load(CUDA_MODULE)
    if module is None:
        return None
    device = torch.device("cuda", index)
    try:
        launch(module.probe, device, _THREADS_OF_PROBE)
    except RuntimeError as error:
        logging.getLogger("zero").warning(
            "the CUDA kernels, compiled for %s, do not run on %s, %s (%s): the optimizer step, norms and packing run "
            "there as plain torch operations, with equal results but several times slower. To get them, install zero "
            "from source with ZERO_CUDA_ARCHS set to this device's compute capability, and a driver that fits nvcc.",
            module.ARCHS, device, torch.cuda.get_device_name(device), error,
        )  # fmt: skip
        return None
    return module


def kernels(device: torch.device) -> ModuleType | None:
    """The compiled module if `device` is a CUDA device that runs it, else None; logs once why a device does not."""
    return _usable(device.index) if device.type == "cuda" else None


def reads_wait(device: torch.device) -> bool:
    """Whether the host would wait for a number on `device`."""
    return device.type != "cpu"


def launch(call: Callable[..., None], device: torch.device, *arguments: Any) -> None:
    """Call a function of the compiled module on `device` and torch's current stream there."""
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.current_device() == device.index:
        call(*arguments, device.index, stream)
        return
    # The call sets the current device, in a copy of the CUDA runtime that torch does not know.
    with torch.cuda.device(device):
        call(*arguments, device.index, stream)


def pin_host(address: int, nbytes: int, device: torch.device) -> Callable[[], None]:
    """Register host memory, whole pages from `address` on, with CUDA; returns a function to undo it, for any thread.

    Copies between it and any device of this process are then asynchronous. `device` must exist; a call takes
    time for every page. Raises RuntimeError, with CUDA's text, if the memory cannot be registered.
    """
    module, index = load(CUDA_MODULE), device.index
    if module is None:
        raise RuntimeError("the compiled module zero._cuda is missing")
    index = torch.cuda.current_device() if index is None else index
    with torch.cuda.device(index):  # as in launch()
        module.host_register(address, nbytes, index)

    def unpin() -> None:
        with torch.cuda.device(index):
            module.host_unregister(address, index)

    return unpin
