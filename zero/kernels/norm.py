"""Sum of squares of a contiguous tensor in fp64, which is also the test whether all its elements are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from zero.kernels.checks import check_tensor, cpu_address
from zero.kernels.native import DTYPE_CODES, load

# Elements that the reference widens to fp64 at a time.
REFERENCE_CHUNK = 1 << 22


def sum_squares(tensor: Tensor) -> float:
    """Return the sum of the squares of all elements, accumulated in fp64.

    The result is inf or NaN exactly when an element is (float64 tensors apart, whose squares can overflow). The
    compiled kernel adds in a fixed structure: blocks of 4096 elements, in each 16 lanes (element i to lane i % 16)
    folded as a tree, blocks in order. Its result does not depend on the instruction set or the number of threads.

    Args:
        tensor: contiguous, any shape; compiled for float32, bfloat16 and float16 on the CPU. 0.0 when empty.

    Raises:
        ValueError: for a tensor that is not contiguous and floating, or whose storage was released.
    """
    module = load()
    code = DTYPE_CODES.get(getattr(tensor, "dtype", None))
    address = 0 if module is None or code is None else cpu_address(tensor, tensor.shape)
    if not address:
        return sum_squares_reference(tensor)
    return module.sum_squares(address, code, tensor.numel(), torch.get_num_threads())


def sum_squares_reference(tensor: Tensor) -> float:
    """:func:`sum_squares` as plain torch operations, on any device; waits for the device.

    Additions come in the order torch likes, so it agrees with the kernel to about 1e-13, relative.
    """
    check_tensor("tensor", tensor)
    flat = tensor.detach().view(-1)
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for begin in range(0, flat.numel(), REFERENCE_CHUNK):
        total += flat[begin : begin + REFERENCE_CHUNK].double().square().sum()
    return total.item()
