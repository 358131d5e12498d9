"""The device of this rank: `torch.cuda` or `torch.cpu` by DeepSpeed's names."""

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import psutil
import torch

from zero.core.comm import local_device

_MEMORY = ("memory_allocated", "memory_reserved", "memory_cached")
_PEAK = ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")


class TorchAccelerator:
    """What is not defined here is that of `torch.cuda`, or of `torch.cpu` on a machine without GPUs."""

    def __init__(self) -> None:
        self._name = local_device().type
        self.Event = torch.Event

    def __getattr__(self, name: str) -> Any:
        """Look the name up in torch's module of the device; without a GPU memory is that of this process, in bytes."""
        if self._name == "cpu" and name in (*_MEMORY, *_PEAK):
            return lambda device_index=None: _process(peak=name in _PEAK)
        return getattr(getattr(torch, self._name), name)

    def device_count(self) -> int:
        """GPUs that this process sees; without one, processes on this host, as its launcher says."""
        said = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
        return int(said) if self._name == "cpu" else torch.cuda.device_count()

    def supported_dtypes(self) -> list[torch.dtype]:
        """What can be trained in."""
        kinds = {torch.half: self.is_fp16_supported(), torch.bfloat16: self.is_bf16_supported()}
        return [torch.float, *(kind for kind, there in kinds.items() if there)]

    def random(self) -> Any:
        """The module `torch.random`."""
        return torch.random

    def range_push(self, msg: str) -> Any:
        """Begin a range of NVTX; without a GPU nothing."""
        return torch.cuda.nvtx.range_push(msg) if self._name == "cuda" else None

    def range_pop(self) -> Any:
        """End it."""
        return torch.cuda.nvtx.range_pop() if self._name == "cuda" else None

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in page-locked memory."""
        return tensor.is_pinned()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin a new peak; without a GPU that of this process, where the system lets it."""
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def device_name(self, device_index: int | None = None) -> str:
        """Its type, "cuda" or "cpu"; with an index that of one GPU, as "cuda:1"."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """The name of the device that is current."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        """What its ranks talk over: "nccl" or "gloo"."""
        return "gloo" if self._name == "cpu" else "nccl"

    def is_bf16_supported(self) -> bool:
        """Whether bf16 can be trained in."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether fp16 can be trained in."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether a call returns only when the device has done it."""
        return self._name == "cpu"

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)  # of the CPU and of all GPUs
    empty_cache = staticmethod(torch.cuda.empty_cache)  # which torch.cpu lacks

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on such a device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked memory, where there is a GPU to copy to."""
        return tensor if self._name == "cpu" else tensor.pin_memory()


@functools.cache
def get_accelerator() -> TorchAccelerator:
    """The one of this process."""
    return TorchAccelerator()


def is_current_accelerator_supported() -> bool:
    """Whether zero runs on it: always."""
    return True


def _process(peak: bool) -> int:
    """Bytes of main memory that this process has, or had at most."""
    if not peak:
        return psutil.Process().memory_info().rss
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
