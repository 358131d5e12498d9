"""Which torch this is."""

import torch
from packaging.version import Version

from deepspeed._names import finder

__getattr__ = finder(__name__, {})


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is at least the one and at most the other, by major and minor version."""
    here = Version(".".join(torch.__version__.split(".")[:2]))
    return Version(str(min_version or 0)) <= here <= (Version(str(max_version)) if max_version else here)
