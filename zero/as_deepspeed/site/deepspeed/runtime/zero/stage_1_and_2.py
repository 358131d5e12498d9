"""The class of `engine.optimizer` at stages 1 and 2."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {"DeepSpeedZeroOptimizer": "deepspeed.runtime.base_optimizer"})
