"""The class of `engine.optimizer` at stage 3."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {"DeepSpeedZeroOptimizer_Stage3": "deepspeed.runtime.base_optimizer"})
