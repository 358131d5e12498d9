"""What every kernel asks of its tensors before an address leaves Python: a wrong one would corrupt memory.

A call asks :func:`address_on` first, which is quick and says yes or no. Only after a no do the ``check_`` functions
find out whether that was an error, and word it, or merely a case for the plain torch version.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

CPU = torch.device("cpu")


def address_on(device: torch.device, tensor: Tensor, shape: tuple[int, ...]) -> int:
    """Address of a contiguous tensor of this shape on `device` with data behind it; 0 for anything else, or none."""
    try:
        # A tensor whose storage was given back still has a shape and an address; reading it would end the process.
        if tensor.device == device and tensor.shape == shape and tensor.is_contiguous():
            return tensor.data_ptr() if tensor.untyped_storage().nbytes() > 0 else 0
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


def check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] | None = None) -> None:
    """Raise ValueError unless ``tensor`` is contiguous, has its storage and is floating, or of one of ``dtypes``."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: got {describe(tensor)}; wanted a torch.Tensor")
    right = tensor.is_floating_point() if dtypes is None else tensor.dtype in dtypes
    if tensor.layout != torch.strided or not (right and tensor.is_contiguous()):
        kind = "floating tensor" if dtypes is None else f"tensor of {' or '.join(map(str, dtypes))}"
        raise ValueError(f"{name}: got {describe(tensor)}; wanted a contiguous {kind}")
    if tensor.numel() > 0 and (tensor.is_meta or tensor.untyped_storage().nbytes() == 0):
        raise ValueError(f"{name}: got {describe(tensor)} without memory (released, or meta); wanted one with data")


def check_on_cpu(name: str, tensor: Tensor) -> int:
    """Raise ValueError unless ``tensor``, of any dtype, is contiguous CPU memory; returns its address, 0 if empty."""
    right = isinstance(tensor, Tensor) and tensor.is_cpu and tensor.layout == torch.strided
    if not (right and tensor.is_contiguous()):
        raise ValueError(f"{name}: got {describe(tensor)}; wanted a contiguous tensor on the CPU")
    if tensor.nbytes == 0:
        return 0
    if tensor.untyped_storage().nbytes() == 0:
        raise ValueError(f"{name}: got {describe(tensor)}, whose storage was released; wanted one with its data")
    address = tensor.data_ptr()
    if address == 0:  # a tracer's
        raise ValueError(f"{name}: got {describe(tensor)} without memory; wanted one with its data")
    return address


def check_flat(
    name: str, tensor: Tensor, numel: int, device: torch.device, dtypes: tuple[torch.dtype, ...] | None = None
) -> None:
    """Raise ValueError unless ``tensor`` passes check_tensor and is 1-D with ``numel`` elements on ``device``."""
    check_tensor(name, tensor, dtypes)
    if tensor.ndim != 1 or tensor.numel() != numel or tensor.device != device:
        raise ValueError(f"{name}: got {describe(tensor)}; wanted shape ({numel},) on {device}")


def check_apart(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError where two of these contiguous tensors, all on one device, share a byte."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors.items() if t.numel() > 0)
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ValueError(
                f"{name}, {other}: got tensors that overlap by {end - start} bytes in memory; wanted them apart"
            )
