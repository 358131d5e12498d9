"""What programs import from DeepSpeed's package of this name."""

from deepspeed._names import finder

_LOADS = "every checkpoint of zero loads at any world size and stage by itself"
__getattr__ = finder(__name__, {"utils": "deepspeed.checkpoint.utils:"}, {"DeepSpeedCheckpoint": _LOADS})
