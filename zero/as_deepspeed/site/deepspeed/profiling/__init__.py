"""What programs import from DeepSpeed's package of this name."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {"flops_profiler": "deepspeed.profiling.flops_profiler:"})
