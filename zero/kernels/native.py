"""The compiled kernels, if they exist: ``zero._cpu`` and ``zero._cuda``, each looked up once per process.

Each kernel in this package runs compiled on contiguous tensors of float32, bfloat16 or float16, on the CPU and on CUDA
devices, and otherwise (other devices, float64, no compiled module) as a sequence of torch operations that gives the
same result.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch

# Codes of csrc/cpu_kernels.h and csrc/cuda_kernels.cuh. The compiled module has kernels for the dtypes in this table.
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NO_TENSOR = -1

CPU_MODULE, CUDA_MODULE = "zero._cpu", "zero._cuda"
_MISSING = {
    CPU_MODULE: "compiled CPU kernels are missing ({}): the optimizer step, norms, packing and row sums of CPU tensors "
    "run as plain torch operations and checksums in zlib, with equal results but several times slower. To get them, "
    "install zero from source with a C++17 compiler and OpenMP at hand, with ZERO_REQUIRE_NATIVE=1 set to see why a "
    "build fails.",
    CUDA_MODULE: "CUDA kernels are missing ({}): the optimizer step, norms and packing of CUDA tensors run as plain "
    "torch operations, with equal results but several times slower, and an optimizer step waits for the device. To get "
    "them, install zero from source with nvcc (CUDA 12.8 or later for all targets) on the PATH or under CUDA_HOME, "
    "with ZERO_REQUIRE_CUDA=1 set to see why a build fails.",
}


@functools.cache
def _find(name: str) -> tuple[ModuleType | None, str | None]:
    """The module of this name, or the message if it is missing."""
    try:
        return importlib.import_module(name), None
    except ImportError as error:
        return None, _MISSING[name].format(f"{type(error).__name__}: {error}")


@functools.cache
def load(name: str = CPU_MODULE) -> ModuleType | None:
    """Return the module of compiled CPU kernels, or that of CUDA kernels, or None when it is missing.

    The first call of a process that finds it missing logs that to ``zero``; later calls are silent. Importing
    the CUDA kernels touches no device; they are loaded only for CUDA tensors.
    """
    module, missing = _find(name)
    if missing is not None:
        logging.getLogger("zero").warning(missing)
    return module


def missing_text(name: str = CPU_MODULE) -> str | None:
    """Why these kernels are missing, what runs instead and how to get them; None if they exist."""
    return _find(name)[1]


def isa() -> str:
    """Instruction set of the compiled kernels in use (``sse2``, ``avx2``, ``neon`` ...), or ``torch`` without them."""
    module = _find(CPU_MODULE)[0]
    return "torch" if module is None else str(module.isa())
