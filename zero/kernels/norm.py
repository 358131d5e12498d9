"""Sum of squares of a contiguous tensor in fp64, which is also the test whether all its elements are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from zero.kernels import cuda
from zero.kernels.checks import CPU, address_on, check_tensor, describe
from zero.kernels.native import DTYPE_CODES, load

# Elements that the reference widens to fp64 at a time.
REFERENCE_CHUNK = 1 << 22

# Elements whose squares the CUDA kernel sums to one number of its scratch memory: kNormBlock of csrc/cuda_kernels.cuh.
NORM_BLOCK = 4096


def sum_squares(tensor: Tensor, threads: int | None = None) -> float:
    """Return the sum of the squares of all elements, accumulated in fp64; waits for the tensor's device.

    The result is inf or NaN exactly when an element is (float64 tensors apart, whose squares can overflow). The
    compiled kernels add in a fixed structure: blocks of 4096 elements, in each 16 lanes (element i to lane i % 16)
    folded as a tree; then 1024 lanes (block b to lane b % 1024, in order) folded as a tree. So the result depends on no
    instruction set, number of threads or chip, and is the same on the CPU and on CUDA.

    Args:
        tensor: contiguous, any shape; compiled for float32, bfloat16 and float16 on the CPU and on CUDA devices. 0.0
            when empty.
        threads: how many compute it on the CPU; default torch's.

    Raises:
        ValueError: for a tensor that is not contiguous and floating, or whose storage was released.
    """
    code = DTYPE_CODES.get(getattr(tensor, "dtype", None))
    if code is not None and tensor.is_cuda and cuda.available(tensor.device):
        out = torch.empty((), dtype=torch.float64, device=tensor.device)
        sum_squares_into(tensor, out)
        return out.item()
    module = load()
    address = 0 if module is None or code is None else address_on(CPU, tensor, tensor.shape)
    if not address:
        return sum_squares_reference(tensor)
    return module.sum_squares(address, code, tensor.numel(), threads or torch.get_num_threads())


def sum_squares_reference(tensor: Tensor) -> float:
    """:func:`sum_squares` as plain torch operations, on any device; waits for the device.

    Additions come in the order torch likes, so it agrees with the kernel to about 1e-13, relative.
    """
    check_tensor("tensor", tensor)
    return _total(tensor).item()


def _total(tensor: Tensor) -> Tensor:
    flat = tensor.detach().view(-1)
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for begin in range(0, flat.numel(), REFERENCE_CHUNK):
        total += flat[begin : begin + REFERENCE_CHUNK].double().square().sum()
    return total


def sum_squares_into(tensor: Tensor, out: Tensor, *, accumulate: bool = False, scratch: Tensor | None = None) -> None:
    """Write the sum of the squares of all elements to `out`, or add it, without waiting for the device.

    The structure of the additions is that of :func:`sum_squares`. Calls that accumulate, to have one number for several
    shards, add in the order of the calls.

    Args:
        tensor: contiguous, any shape; compiled for float32, bfloat16 and float16.
        out: one float64 number on the tensor's device, any shape.
        accumulate: add to `out` rather than overwrite it.
        scratch: float64, at least :func:`norm_scratch` (numel) elements, on the tensor's device; for CUDA devices,
            which otherwise get it from torch's allocator in each call. The CPU uses none.

    Raises:
        ValueError: for tensors that are not contiguous and floating or whose storage was released, and an `out` or a
            `scratch` that does not fit.
    """
    check_tensor("tensor", tensor)
    check_tensor("out", out, (torch.float64,))
    device = tensor.device
    if out.numel() != 1 or out.device != device:
        raise ValueError(f"out: got {describe(out)}; wanted one number on {device}")
    code, module = DTYPE_CODES.get(tensor.dtype), cuda.kernels(device)
    if code is not None and module is not None:
        address = address_on(device, tensor, tensor.shape)
        memory = _scratch(tensor.numel(), device, scratch)
        arguments = address, code, tensor.numel(), memory.data_ptr(), out.data_ptr(), accumulate
        cuda.launch(module.sum_squares, device, *arguments)
        return
    total = sum_squares(tensor) if tensor.is_cpu else _total(tensor).view(out.shape)
    with torch.no_grad():
        if accumulate:
            out += total
        elif isinstance(total, Tensor):
            out.copy_(total)
        else:
            out.fill_(total)


def norm_scratch(numel: int) -> int:
    """How many float64 numbers of scratch memory :func:`sum_squares_into` wants for `numel` elements."""
    return -(-numel // NORM_BLOCK)


def _scratch(numel: int, device: torch.device, scratch: Tensor | None) -> Tensor:
    if scratch is None:
        return torch.empty(norm_scratch(numel), dtype=torch.float64, device=device)
    check_tensor("scratch", scratch, (torch.float64,))
    if scratch.numel() < norm_scratch(numel) or scratch.device != device:
        raise ValueError(
            f"scratch: got {describe(scratch)}; wanted at least {norm_scratch(numel)} elements on {device} "
            f"for {numel} elements"
        )
    return scratch
