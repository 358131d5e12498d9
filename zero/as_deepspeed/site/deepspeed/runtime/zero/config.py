"""The section `zero_optimization` of the JSON."""

from deepspeed._names import finder

__getattr__ = finder(
    __name__,
    {
        "DeepSpeedZeroConfig": "zero.config.zero_section:ZeroOptimization",
        "DeepSpeedZeroOffloadOptimizerConfig": "zero.config.zero_section:OffloadOptimizer",
        "DeepSpeedZeroOffloadParamConfig": "zero.config.zero_section:OffloadParam",
    },
)
