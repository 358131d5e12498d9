"""Sum of squares of a contiguous tensor in fp64, which also tests whether all its elements are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from zero.kernels import cuda
from zero.kernels.checks import FLOATING, address_of, describe
from zero.kernels.native import DTYPE_CODES, load

# Elements that the reference widens to fp64 at a time.
REFERENCE_CHUNK = 1 << 22

# Elements whose squares the CUDA kernel sums to one number of its scratch memory: kNormBlock of csrc/cuda_kernels.cuh.
NORM_BLOCK = 4096


def sum_squares(tensor: Tensor, threads: int | None = None) -> float:
    """The sum of the squares of all elements, accumulated in fp64; waits for the tensor's device.

    The result is inf or NaN exactly when an element is (float64 tensors apart, whose squares can overflow). The
    compiled kernels add in a fixed structure: blocks of 4096 elements, in each 16 lanes (element i to lane i % 16)
    folded as a tree; then 1024 lanes (block b to lane b % 1024, in order) folded as a tree. So the result is
    the same for every instruction set, number of threads and chip, on the CPU and on CUDA.

    tensor: contiguous, any shape; compiled for float32, bfloat16 and float16. threads: of a CPU; default torch's.
    Raises ValueError for a tensor that is not contiguous and floating, or whose storage was released.
    """
    address, code = address_of("tensor", tensor, FLOATING), DTYPE_CODES.get(tensor.dtype)
    if code is not None and cuda.kernels(tensor.device) is not None:
        out = torch.empty((), dtype=torch.float64, device=tensor.device)
        sum_squares_into(tensor, out)
        return out.item()
    module = load() if code is not None and tensor.is_cpu else None
    if module is None:
        return _total(tensor).item()
    return module.sum_squares(address, code, tensor.numel(), threads or torch.get_num_threads())


def sum_squares_reference(tensor: Tensor) -> float:
    """:func:`sum_squares` as plain torch operations, on any device; waits for the device.

    Torch chooses the order of additions, so it agrees with the kernel only to about 1e-13, relative.
    """
    address_of("tensor", tensor, FLOATING)
    return _total(tensor).item()


def _total(tensor: Tensor) -> Tensor:
    flat = tensor.detach().view(-1)
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for begin in range(0, flat.numel(), REFERENCE_CHUNK):
        total += flat[begin : begin + REFERENCE_CHUNK].double().square().sum()
    return total


def sum_squares_into(tensor: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """Write the sum of the squares of all elements to `out`, or add it, without waiting for the device.

    The structure of the additions, the tensor and the errors are those of :func:`sum_squares`. Calls that accumulate
    one number for several shards add in the order of the calls. `out`: one float64 number on the tensor's device.
    """
    address, device = address_of("tensor", tensor, FLOATING), tensor.device
    target = address_of("out", out, (torch.float64,), device=device)
    if out.numel() != 1:
        raise ValueError(f"out: got {describe(out)}; wanted one number")
    code, module = DTYPE_CODES.get(tensor.dtype), cuda.kernels(device)
    if code is not None and module is not None:
        blocks = -(-tensor.numel() // NORM_BLOCK)
        memory = torch.empty(blocks, dtype=torch.float64, device=device)
        cuda.launch(module.sum_squares, device, address, code, tensor.numel(), memory.data_ptr(), target, accumulate)
        return
    total = sum_squares(tensor) if tensor.is_cpu else _total(tensor).view(out.shape)
    with torch.no_grad():
        if accumulate:
            out += total
        elif isinstance(total, Tensor):
            out.copy_(total)
        else:
            out.fill_(total)
