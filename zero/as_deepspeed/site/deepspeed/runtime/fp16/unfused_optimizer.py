"""The same class: every optimizer is fused here."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {"FP16_UnfusedOptimizer": "deepspeed.runtime.base_optimizer:FP16_Optimizer"})
