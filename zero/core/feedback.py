"""Gradients that travel in 8 bits (ZeRO++'s qgZ, Wang et al. 2023, section 3.3); the format: zero/kernels/wire.py.

A gradient is encoded together with the error of the one before, which each rank keeps, in 8 bits as well (error
feedback: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Xie et al., "LoCo", 2024). The messages of all ranks
are decoded and added in fp32, in the order of ranks.
"""

from __future__ import annotations

import torch

from zero.kernels.wire import decode, encode, sum_messages
from zero.plan.formats import wire_nbytes


class ErrorFeedback:
    """Encodes one unit's local gradients [n], and keeps the error for the next, from the start in the same memory."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._error = torch.zeros(wire_nbytes(numel), dtype=torch.uint8, device=device)  # which reads as zeros

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        """The message of `flat` [n], of any floating dtype, and of the error that is left."""
        values = flat.to(torch.float32, copy=True)
        sum_messages([self._error], values, True)
        message = encode(values)
        values -= decode(message, torch.empty_like(values))
        encode(values.nan_to_num_(0.0, 0.0, 0.0), self._error)
        return message

    def forget(self) -> None:
        """The last gradient came to nothing."""
        self._error.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of the error."""
        return self._error.nbytes
