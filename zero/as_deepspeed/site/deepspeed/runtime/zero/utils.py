"""The error of DeepSpeed's checkpoints."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {})


class ZeRORuntimeException(Exception):
    """What DeepSpeed raises where a checkpoint is of another world size. Here every checkpoint loads: nothing does."""
