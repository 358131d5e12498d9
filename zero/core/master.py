"""The exact values behind a shard: fp32 numbers, or the 16 bits by which they differ from bf16 parameters.

A bf16 shard is rounded with ties away from zero under both forms, because only so 16 bits are enough for the
difference (zero/kernels/remainder.py). So both forms give the same parameters, bit by bit.
"""

from __future__ import annotations

import torch

from zero.kernels.remainder import join, round_bf16, split


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` in the dtype of parameters that have a master: bf16 with ties away from zero, else as torch rounds."""
    return round_bf16(values) if dtype == torch.bfloat16 else values.to(dtype)


class Master:
    """The fp32 values of which one shard [n] is the rounding.

    shard:  the parameters; read and written by the optimizer, too;
    tensor: what is kept beside them: fp32 [n]; int16 [n], the remainders of a bf16 shard; or, where the shard is
            fp32, the shard itself.
    """

    def __init__(self, shard: torch.Tensor, tensor: torch.Tensor | None) -> None:
        """Keep `tensor` [n] beside the shard; None where the shard is fp32."""
        self.shard = shard
        self.tensor = shard if tensor is None else tensor

    @property
    def remainder(self) -> bool:
        """Whether `tensor` holds remainders."""
        return self.tensor.dtype == torch.int16

    @property
    def rounding(self) -> torch.Tensor | None:
        """The shard where it is something else than the master, so that a step has to write both."""
        return None if self.tensor is self.shard else self.shard

    @property
    def nbytes(self) -> int:
        """Bytes beside the shard."""
        return 0 if self.tensor is self.shard else self.tensor.nbytes

    def values(self, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """The exact values, fp32 [numel or all] from `start` on; to be read only, as they may be the storage itself."""
        part = slice(start, None if numel is None else start + numel)
        return join(self.shard[part], self.tensor[part]) if self.remainder else self.tensor[part]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace the exact values from `start` on by `values` (fp32 [k]), and the shard by their rounding."""
        part = slice(start, start + values.numel())
        if self.remainder:
            bits, rest = split(values)
            self.shard[part].copy_(bits)
            self.tensor[part].copy_(rest)
            return
        self.tensor[part].copy_(values)
        if self.tensor is not self.shard:
            self.shard[part].copy_(rounded(values, self.shard.dtype))

    def follow(self, start: int, numel: int, where: torch.Tensor | None = None) -> None:
        """Take the parameters as exact from element `start` on: they were written by other code.

        `where`: only those elements, bool [numel].
        """
        if self.tensor is self.shard:
            return
        part = self.tensor.narrow(0, start, numel)
        now = torch.zeros_like(part) if self.remainder else self.shard.narrow(0, start, numel).to(part.dtype)
        part.copy_(now if where is None else torch.where(where, now, part))

    def publish(self) -> None:
        """Round an fp32 `tensor` that was written into the shard; remainders are written together with it."""
        if self.tensor is not self.shard:
            self.shard.copy_(rounded(self.tensor, self.shard.dtype))
