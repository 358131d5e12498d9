"""The classes of `engine.optimizer`: programs ask by them which stage there is."""

import torch

import zero
from zero.optim.optimizer import ZeroOptimizer
from zero.utils import safe_get_local_fp32_param


class DeepSpeedOptimizer(ZeroOptimizer):
    """The optimizer of zero, with the internal that programs look at."""

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """Copies of the exact values that this rank updates: flat fp32, one tensor for each parameter group."""
        pieces = [[safe_get_local_fp32_param(param) for param in group["params"]] for group in self.param_groups]
        return [torch.cat([piece for piece in group if piece is not None]) for group in pieces]


class DeepSpeedZeroOptimizer(DeepSpeedOptimizer):
    """That of stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(DeepSpeedOptimizer):
    """That of stage 3."""

    fp32_partitioned_groups_flat = DeepSpeedOptimizer.single_partition_of_fp32_groups


class BF16_Optimizer(DeepSpeedOptimizer):
    """That of stage 0 with bf16."""


class FP16_Optimizer(DeepSpeedOptimizer):
    """That of stage 0 with fp16."""

    fp32_groups_flat = DeepSpeedOptimizer.single_partition_of_fp32_groups


def kind(engine: zero.Engine) -> type[DeepSpeedOptimizer]:
    """The class for the optimizer of this engine."""
    if stage := engine.zero_optimization_stage():
        return DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
    return (
        FP16_Optimizer if engine.fp16_enabled() else BF16_Optimizer if engine.bfloat16_enabled() else DeepSpeedOptimizer
    )
