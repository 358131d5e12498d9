"""What every kernel asks of its tensors before an address leaves Python: a wrong one would corrupt memory.

A call asks :func:`cpu_address` first, which is quick and says yes or no. Only after a no do the ``check_`` functions
find out whether that was an error, and word it, or merely a case for the plain torch version.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cpu_address(tensor: Tensor, shape: tuple[int, ...]) -> int:
    """Address of a contiguous CPU tensor of this shape with data behind it; 0 if it is anything else, or empty."""
    try:
        # A tensor whose storage was given back still has a shape and an address; reading it would end the process.
        if tensor.is_cpu and tensor.shape == shape and tensor.is_contiguous() and tensor.untyped_storage().nbytes() > 0:
            return tensor.data_ptr()
    except (AttributeError, RuntimeError):  # no tensor at all; a sparse one; one of a tracer, without memory
        pass
    return 0


def describe(tensor: object) -> str:
    """A tensor in words, for an error message: shape, dtype, device, layout."""
    if not isinstance(tensor, Tensor):
        return f"{type(tensor).__name__}"
    layout = str(tensor.layout)
    if tensor.layout == torch.strided:
        layout = "contiguous" if tensor.is_contiguous() else f"strides {tuple(tensor.stride())}"
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}, {layout}"


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless ``tensor`` is contiguous, floating and has its storage."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: got {describe(tensor)}; wanted a torch.Tensor")
    if tensor.layout != torch.strided or not (tensor.is_contiguous() and tensor.is_floating_point()):
        raise ValueError(f"{name}: got {describe(tensor)}; wanted a contiguous floating tensor")
    if tensor.numel() > 0 and (tensor.is_meta or tensor.untyped_storage().nbytes() == 0):
        raise ValueError(f"{name}: got {describe(tensor)} without memory (released, or meta); wanted one with data")


def check_flat(name: str, tensor: Tensor, numel: int, device: torch.device) -> None:
    """Raise ValueError unless ``tensor`` passes check_tensor and is 1-D with ``numel`` elements on ``device``."""
    check_tensor(name, tensor)
    if tensor.ndim != 1 or tensor.numel() != numel or tensor.device != device:
        raise ValueError(f"{name}: got {describe(tensor)}; wanted shape ({numel},) on {device}")
