"""Whether drives can be read and written; zero always can."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {"AsyncIOBuilder": "deepspeed.ops.op_builder"})
