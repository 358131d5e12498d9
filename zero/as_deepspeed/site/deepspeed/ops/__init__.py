"""Optimizers by DeepSpeed's names, and which kernels there are."""

from collections import defaultdict

from deepspeed._names import finder

__compatible_ops__ = defaultdict(bool, {"async_io": True, "cpu_adam": True, "cpu_adagrad": True, "cpu_lion": True})

__getattr__ = finder(__name__, {name: f"deepspeed.ops.{name}:" for name in ("adam", "adagrad", "lamb", "lion", "aio")})
