"""In each process of a suite: where there is no GPU, Transformers takes bf16 all the same, as ranks on the CPU do."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_ASKS = "transformers.training_args"


class _Finder:
    """Finds the module that asks, and answers it once it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _ASKS else None
        if spec is not None:
            load = spec.loader.exec_module

            def answered(module: Any) -> None:
                load(module)
                asked = module.is_torch_bf16_gpu_available  # an AttributeError here: the library asks otherwise now
                module.is_torch_bf16_gpu_available = lambda: asked() or not module.torch.cuda.is_available()

            spec.loader.exec_module = answered
        return spec


sys.meta_path.insert(0, _Finder)
