"""Optimizers by DeepSpeed's names, and which kernels there are."""

from collections import defaultdict

from deepspeed._names import finder

_KERNELS = ("async_io", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion")
__compatible_ops__ = defaultdict(bool, dict.fromkeys(_KERNELS, True))

_NAMES = ("adam", "adagrad", "aio", "lamb", "lion", "op_builder")
__getattr__ = finder(__name__, {name: f"deepspeed.ops.{name}:" for name in _NAMES})
