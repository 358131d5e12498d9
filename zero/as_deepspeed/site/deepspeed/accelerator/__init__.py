"""The device of this rank: `torch.cuda` or `torch.cpu` by DeepSpeed's names."""

import functools
from typing import Any

import psutil
import torch

from zero.core.mesh import local_device


class TorchAccelerator:
    """What is not defined here is that of `torch.cuda`, or of `torch.cpu` on a machine without GPUs."""

    def __init__(self) -> None:
        self._name = local_device().type
        self.Event = torch.Event

    def __getattr__(self, name: str) -> Any:
        """Look the name up in torch's module of the device."""
        return getattr(getattr(torch, self._name), name)

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

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of the CPU and of all GPUs."""
        torch.manual_seed(seed)

    def empty_cache(self) -> None:
        """Give memory back that the device's allocator keeps."""
        torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use: of tensors on the GPU; without one, of this process."""
        if self._name == "cpu":
            return psutil.Process().memory_info().rss
        return torch.cuda.memory_allocated(device_index)

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
