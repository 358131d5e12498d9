"""The checks of every kernel's tensors before an address leaves Python: a wrong one would corrupt memory."""

from __future__ import annotations

import torch
from torch import Tensor

CPU = torch.device("cpu")
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def describe(tensor: object) -> str:
    """A tensor in words, for an error message: shape, dtype, device, layout."""
    if not isinstance(tensor, Tensor):
        return f"{type(tensor).__name__}"
    layout = str(tensor.layout)
    if tensor.layout == torch.strided:
        layout = "contiguous" if tensor.is_contiguous() else f"strides {tuple(tensor.stride())}"
        if tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0:
            layout += ", released"
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}, {layout}"


def address_of(
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    device: torch.device | None = None,
) -> int:
    """Address of a contiguous tensor with memory; any number, also 0, if it is empty.

    Raises ValueError, with `name`, for other objects, and for another dtype, shape or device than required.
    """
    try:
        right = tensor.is_contiguous() and (dtypes is None or tensor.dtype in dtypes)
        if right and (shape is None or tensor.shape == shape) and (device is None or tensor.device == device):
            # A tensor whose storage was freed still has a shape and an address; reading it would end the process.
            address = tensor.data_ptr() if tensor.untyped_storage().nbytes() > 0 else 0
            if address or tensor.numel() == 0:
                return address
    except (AttributeError, RuntimeError):  # not a tensor; a sparse one; a tracer's, without memory
        pass
    wanted = [] if shape is None else [f"shape {tuple(shape)}"]
    wanted += [] if dtypes is None else [" or ".join(map(str, dtypes))]
    wanted += [] if device is None else [str(device)]
    raise ValueError(f"{name}: got {describe(tensor)}; wanted {', '.join([*wanted, 'a contiguous tensor with data'])}")


def check_apart(spans: list[tuple[int, int, str]]) -> None:
    """Raise ValueError if two of these spans of one memory, each (address, end, name), share a byte; sorts them."""
    spans.sort()
    end, name = 0, ""
    for start, stop, other in spans:
        if start < end:
            raise ValueError(
                f"{name}, {other}: got tensors that overlap by {end - start} bytes in memory; wanted them apart"
            )
        end, name = stop, other
