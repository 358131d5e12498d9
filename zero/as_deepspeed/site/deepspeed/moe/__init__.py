"""What programs import from DeepSpeed's package of this name."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {name: f"deepspeed.moe.{name}:" for name in ("layer", "utils")})
