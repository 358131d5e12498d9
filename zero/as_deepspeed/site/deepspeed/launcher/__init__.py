"""DeepSpeed's launcher is `zero run` here."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {"runner": "deepspeed.launcher.runner:"})
