"""What programs import from DeepSpeed's package of this name."""

from deepspeed._names import finder

_NAMES = ("base_optimizer", "bf16_optimizer", "config", "engine", "fp16", "lr_schedules", "utils", "zero")
__getattr__ = finder(__name__, {name: f"deepspeed.runtime.{name}:" for name in _NAMES})
