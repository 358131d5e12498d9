"""In which dtypes a model is trained: its parameters and buffers, and its gradients as they land, travel and add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zero.core.comm import Axis
from zero.core.gradients import GradientDtypes
from zero.core.world import World
from zero.plan.formats import Formats, resting_dtype
from zero.plan.sharding import Sharding

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


UNKNOWN = 1 << 20  # micro-batches of a step where the script decides: more than one


class MixedPrecisionPolicy(NamedTuple):
    """The dtypes of parameters and of the optimizer's state, and how many micro-batches add up in one step.

    accumulate:  the dtype in which gradients add up;
    communicate: what gradients are rounded to before they travel; None leaves them as they are;
    buffers:     the dtype of the module's floating-point buffers; None leaves each as it is;
    tree:        gradients are added in an order that does not depend on the number of ranks;
    quantized:   they travel in 8 bits.
    """

    compute_dtype: str
    accumulation: int
    formats: Formats = Formats()
    accumulate: str = "fp32"
    communicate: str | None = None
    buffers: str | None = None
    tree: bool = False
    quantized: bool = False

    def gradient_dtypes(self, dtype: str, sharding: Sharding) -> GradientDtypes:
        """The dtypes of the gradient of a unit whose parameters are of `dtype`.

        Gradients travel as they come; where micro-batches add up in the local buffer before they are reduced, it has
        the dtype in which they `accumulate`.
        """
        local = dtype if sharding.grads or self.accumulation == 1 else self.accumulate
        travel = None if self.communicate is None else DTYPES[self.communicate]
        return GradientDtypes(DTYPES[local], DTYPES[self.accumulate], travel)

    def resting_dtype(self, world: World, shards: Sequence[Axis]) -> str:
        """The dtype of reduced gradients in host memory; see `zero.plan.formats`. `shards`: the axes of all units."""
        sent = DTYPES[self.compute_dtype]
        native = world.native and all(sent.itemsize > shard.summed_here for shard in shards) and not self.quantized
        alone = world.size == 1 or native
        rounded = self.accumulation == 1 and alone and not self.tree and self.communicate is None
        return resting_dtype(self.compute_dtype, self.accumulate, rounded)
