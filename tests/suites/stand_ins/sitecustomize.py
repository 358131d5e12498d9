"""In each process of a suite: Transformers takes bf16 where there is no GPU, as ranks on the CPU do, and has a name
that programs import from where Transformers 4 had it."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def _takes_bf16(module: Any) -> None:
    asked = module.is_torch_bf16_gpu_available  # an AttributeError here: the library asks otherwise now
    module.is_torch_bf16_gpu_available = lambda: asked() or not module.torch.cuda.is_available()


def _has_old_name(module: Any) -> None:
    if not hasattr(module, "no_init_weights"):
        from transformers.initialization import no_init_weights

        module.no_init_weights = no_init_weights


_CHANGES = {"transformers.training_args": _takes_bf16, "transformers.modeling_utils": _has_old_name}


class _Finder:
    """Finds the modules that are to be changed, which they are once they are loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _CHANGES else None
        if spec is not None:
            load = spec.loader.exec_module

            def changed(module: Any) -> None:
                load(module)
                _CHANGES[name](module)

            spec.loader.exec_module = changed
        return spec


sys.meta_path.insert(0, _Finder)
