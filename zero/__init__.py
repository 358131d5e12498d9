"""zero: a ZeRO optimizer-and-memory engine for PyTorch.

    import zero
    engine, optimizer, loader, scheduler = zero.initialize(model=model, config="zero.json", training_data=data)

Names are looked up when they are first used, so `import zero` costs next to nothing and makes no CUDA context.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "initialize": "zero.engine",
    "estimate": "zero.sizes.estimate",
    "add_config_arguments": "zero.engine",
    "Engine": "zero.engine",
    "GatheredParameters": "zero.core.access",
    "Init": "zero.engine.init",
    "Box": "zero.plan.cut",
    "Cut": "zero.plan.cut",
    "UnitAxes": "zero.plan.grid",
    "set_cut": "zero.core.owner",
    "share_along": "zero.core.owner",
    "register_external_parameter": "zero.core.access",
    "unregister_external_parameter": "zero.core.access",
    "register_forward_method": "zero.core.hooks",
    "load_weights": "zero.engine.checkpoint.load_weights",
    "WeightUpdate": "zero.kernels.marks",
    "FusedOptimizer": "zero.optim.fused",
    "attention": "zero.parallel.attention",
    "shared_attention": "zero.parallel.attention",
    "init_distributed": "zero.engine.joining",
    "RepeatingLoader": "zero.data",
    "TokenBatchSampler": "zero.data",
    "pack": "zero.data",
    "random_split": "zero.data",
    "seed_everything": "zero.data",
    "skip_first_batches": "zero.data",
    "tiled_cross_entropy": "zero.tiled.loss",
    "TiledLinear": "zero.tiled.linear",
    "tile_loss": "zero.tiled.loss",
    "tile_mlp": "zero.tiled.mlp",
    "experts": "zero.parallel.experts.find",
    "layout": "zero.parallel.operators.cutting",
    "shard": "zero.parallel.operators.cutting",
    "groups": "zero.parallel.grid_groups",
    "LayerSpec": "zero.engine.pipeline_module",
    "PipelineModule": "zero.engine.pipeline_module",
    "tp_model_init": "zero.parallel.tensor.told_sizes",
    "TiedLayerSpec": "zero.engine.pipeline_module",
    "ConfigError": "zero.config",
}
_MODULES = ("checkpointing", "config", "core", "data", "engine", "kernels", "launch", "log", "optim", "plan", "utils")

__all__ = ["__version__", *_HOMES, *_MODULES]

if TYPE_CHECKING:  # for type checkers and editors, which follow imports
    from zero import checkpointing, config, core, data, engine, kernels, launch, log, optim, plan, utils
    from zero.config import ConfigError
    from zero.core.access import GatheredParameters, register_external_parameter, unregister_external_parameter
    from zero.core.hooks import register_forward_method
    from zero.core.owner import set_cut, share_along
    from zero.data import RepeatingLoader, TokenBatchSampler, pack, random_split, seed_everything, skip_first_batches
    from zero.engine.arguments import add_config_arguments
    from zero.engine.checkpoint.load_weights import load_weights
    from zero.engine.engine import Engine
    from zero.engine.init import Init
    from zero.engine.initialize import initialize
    from zero.engine.joining import init_distributed
    from zero.engine.pipeline_module import LayerSpec, PipelineModule, TiedLayerSpec
    from zero.kernels.marks import WeightUpdate
    from zero.optim.fused import FusedOptimizer
    from zero.parallel.attention import attention, shared_attention
    from zero.parallel.experts.find import experts
    from zero.parallel.grid_groups import groups
    from zero.parallel.operators.cutting import layout, shard
    from zero.parallel.tensor.told_sizes import tp_model_init
    from zero.plan.cut import Box, Cut
    from zero.plan.grid import UnitAxes
    from zero.sizes.estimate import estimate
    from zero.tiled.linear import TiledLinear
    from zero.tiled.loss import tile_loss, tiled_cross_entropy
    from zero.tiled.mlp import tile_mlp
else:  # to a type checker every name would be there

    def __getattr__(name: str) -> Any:
        """Import the module in which a public name lives, on first use."""
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"zero.{name}")
        from zero.deepspeed_names import instead

        raise AttributeError(f"module 'zero' has no attribute '{name}'{instead(f'deepspeed.{name}')}")


def __dir__() -> list[str]:
    """Every public name, also those not yet imported."""
    return sorted(__all__)


def _prepare() -> None:
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # a rank of `zero run` or torchrun, which prints errors once
        importlib.import_module("zero.errors").install()
    if "torch.nn" in sys.modules:  # else whatever of zero imports torch first
        importlib.import_module("zero.recompute.marks")  # gives modules a method


_prepare()
