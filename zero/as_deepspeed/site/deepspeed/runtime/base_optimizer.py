"""The class of `engine.optimizer`."""

import torch

from deepspeed._names import finder
from zero.optim.optimizer import ZeroOptimizer
from zero.utils import safe_get_local_fp32_param


class DeepSpeedOptimizer(ZeroOptimizer):
    """The optimizer of zero, with the internal that programs look at."""

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """Copies of the exact values that this rank updates: flat fp32, one tensor for each parameter group."""
        pieces = [[safe_get_local_fp32_param(param) for param in group["params"]] for group in self.param_groups]
        return [torch.cat([piece for piece in group if piece is not None]) for group in pieces]


__getattr__ = finder(__name__, {"ZeROOptimizer": "deepspeed.runtime.base_optimizer:DeepSpeedOptimizer"})
