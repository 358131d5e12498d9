"""What programs import from DeepSpeed's package of this name."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {"utils": "deepspeed.moe.utils:"})
