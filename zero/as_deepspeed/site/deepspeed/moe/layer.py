"""Experts can be imported, and say what to use where one is made."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {}, refused=("MoE",))
