"""The class of `engine.optimizer`."""

from deepspeed._names import finder

__getattr__ = finder(
    __name__,
    {
        "DeepSpeedOptimizer": "zero.optim.optimizer:ZeroOptimizer",
        "ZeROOptimizer": "zero.optim.optimizer:ZeroOptimizer",
    },
)
