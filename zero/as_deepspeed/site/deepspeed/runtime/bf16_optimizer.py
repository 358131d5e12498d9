"""The class of `engine.optimizer` at stage 0 with bf16."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {"BF16_Optimizer": "deepspeed.runtime.base_optimizer"})
