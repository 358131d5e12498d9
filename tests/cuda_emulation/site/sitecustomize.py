"""Gives every process of Python that starts with this folder on its PYTHONPATH the CUDA device of ../device.cpp.

ZERO_STAND_IN is the folder of what `../build.py` compiled. torch.cuda is torch_cuda.py, with streams on which all is
done when it is asked for. The kernels of zero are the emulated ones.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def load_device(folder: Path) -> None:
    """Before torch is imported: it asks once which devices there are."""
    spec = importlib.util.find_spec("torch")
    libraries = Path(spec.origin).parent / "lib"  # type: ignore[union-attr, arg-type]
    for path in (*(libraries / f"lib{name}.so" for name in ("c10", "torch_cpu", "torch")), folder / "device.so"):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def emulated_kernels(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_cuda", folder / "_cuda.so")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def patch_torch() -> None:
    """Give torch.cuda one device."""
    import torch
    import torch_cuda

    for name, value in torch_cuda.functions().items():
        setattr(torch.cuda, name, value)

    plain = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if not storage.is_cuda:
            return plain(storage, nbytes)
        torch.ops.stand_in.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage), nbytes)
        return storage

    torch.UntypedStorage.resize_ = resize_
    torch.Tensor.record_stream = lambda *args: None  # the C++ takes none but its own streams


def main() -> None:
    folder = Path(os.environ["ZERO_STAND_IN"])
    load_device(folder)
    patch_torch()
    if (folder / "_cuda.so").exists():
        sys.modules["zero._cuda"] = emulated_kernels(folder)


main()
