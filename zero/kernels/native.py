"""The compiled kernels, if they are there: ``zero._cpu``, found once per process.

Each kernel in this package runs compiled on contiguous CPU tensors of float32, bfloat16 or float16, and otherwise
(other devices, float64, no compiled module) as a sequence of torch operations that gives the same result.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch

# Codes of csrc/cpu_kernels.h. Reading them is the test "has the compiled module a kernel for this dtype".
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NO_TENSOR = -1


@functools.cache
def _find() -> tuple[ModuleType | None, str | None]:
    """Import ``zero._cpu``; returns (module, None) or (None, reason)."""
    try:
        return importlib.import_module("zero._cpu"), None
    except ImportError as error:
        return None, f"{type(error).__name__}: {error}"


@functools.cache
def load() -> ModuleType | None:
    """Return the module of compiled kernels, or None when it is missing.

    The first call of a process that finds it missing says so on the logger ``zero``; later calls are silent.
    """
    module, reason = _find()
    if module is None:
        logging.getLogger("zero").warning(
            "compiled CPU kernels are missing (%s): the Adam step, norms, packing and row sums of CPU tensors run as "
            "plain torch operations, with equal results but several times slower. To get them, install zero from "
            "source with a C++17 compiler and OpenMP at hand, with ZERO_REQUIRE_NATIVE=1 set to see why a build fails.",
            reason,
        )
    return module


def missing_reason() -> str | None:
    """Why there are no compiled kernels (text of the import error), or None when they are there."""
    return _find()[1]


def isa() -> str:
    """Instruction set of the compiled kernels in use (``scalar``, ``avx2``, ``avx512``), or ``torch`` without them."""
    module, _ = _find()
    return "torch" if module is None else str(module.isa())
