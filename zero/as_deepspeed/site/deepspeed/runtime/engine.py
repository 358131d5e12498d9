"""`deepspeed.initialize` and the engine that it makes."""

import functools
import inspect
import logging
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from deepspeed import _helpers
from deepspeed._accelerate import gather_parts
from deepspeed._sentence_transformers import save_whole
from deepspeed.comm import _engines, init_distributed
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer as DeepSpeedOptimizer
from deepspeed.runtime.base_optimizer import kind
from deepspeed.runtime.zero.partition_parameters import ParameterOffload, _sharing_batches
from torch import distributed as dist
from torch import nn

import zero
from zero.config.read import read
from zero.deepspeed_names import instead
from zero.engine import pipeline_engine
from zero.log import log_once
from zero.parallel.grid_groups import GridGroups
from zero.parallel.tensor.told_sizes import json_sizes

_WHY = {
    "use_node_local_storage": "every rank reads its part of one folder, which all see",
    "offload_param": "parameters are cut, and so leave the device, on stage 3 only",
    "offload_optimizer": "optimizer state is cut, and so leaves the device, on stages 1 to 3 only",
}
_SCRIPT = Path(__file__).parents[2] / "bin" / "zero_to_fp32.py"


class DeepSpeedEngine(zero.Engine):
    """The engine of zero; beside its checkpoints lies the script that DeepSpeed puts there."""

    sparse_tensor_module_names: Collection[str] = frozenset()  # gradients are dense

    @functools.wraps(zero.Engine.save_checkpoint)
    def save_checkpoint(self, save_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """See `zero.Engine.save_checkpoint`."""
        saved = super().save_checkpoint(save_dir, *args, **kwargs)
        if self.global_rank == 0:
            shutil.copy(_SCRIPT, save_dir)
        return saved

    def get_global_grad_norm(self) -> float | None:
        """See `zero.Engine.get_global_grad_norm`; None also after a step that fp16 skipped, where zero says nan."""
        return None if self.optimizer is not None and self.optimizer.overflow else super().get_global_grad_norm()


class _Inside:
    """A name of a class that programs change, and that is not in zero."""

    def __get__(self, engine: Any, kind: type) -> Any:
        raise AttributeError(f"'{kind.__name__}' has no _INSTRUCTION_MAP{instead('engine._INSTRUCTION_MAP')}")


class PipelineEngine(DeepSpeedEngine, pipeline_engine.PipelineEngine):
    """That of a model in stages."""

    _INSTRUCTION_MAP = _Inside()


@functools.wraps(zero.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple:
    """See `zero.initialize`. A model without trained parameters needs no optimizer, whatever the JSON says."""
    given = inspect.signature(zero.initialize).bind(*args, **kwargs).arguments
    if given.get("dist_init_required") is not False:
        init_distributed()
    save_whole()
    gather_parts()
    for name in ("config", "config_params"):
        if given.get(name) is not None:
            given[name] = _fitting(read(given[name]).values, given.get("model"))
    # So it is beside ParallelismConfig(tp_size=...).
    if type(given.get("optimizer")).__name__ == "AcceleratedOptimizer":
        given["optimizer"] = given["optimizer"].optimizer
    engine, optimizer, loader, scheduler = zero.initialize(**given)
    _helpers.mpu = given.get("mpu") or _helpers.mpu
    _say_groups(engine, given.get("mpu"))
    engine.__class__ = PipelineEngine if isinstance(engine, pipeline_engine.PipelineEngine) else DeepSpeedEngine
    _engines.add(engine)
    if optimizer is not None:
        optimizer.__class__ = kind(engine)
        if engine.zero_optimization_partition_weights():
            optimizer.parameter_offload = ParameterOffload()
    _helpers.log_dist(f"DeepSpeed info: zero {zero.__version__}, stage {engine.zero_optimization_stage()}", ranks=[0])
    return engine, optimizer, loader, scheduler


def _say_groups(engine: Any, mpu: Any) -> None:
    """Have `engine.mpu` and `deepspeed.utils.groups` tell of its ranks; collective where groups are to be made."""
    grid = engine._config.grid
    if grid.world != dist.get_world_size():  # an engine of the data-parallel group of `mpu`
        engine.mpu = mpu
        return
    here = GridGroups(grid)
    engine.mpu = mpu or here
    if grid.size("mp") > 1 or _helpers.grid is None:
        _helpers.grid = here
    if grid.size("mp") > 1:  # whoever asks for one later may be alone
        for axis in ("tensor_model", "data", "model"):
            getattr(here, f"get_{axis}_parallel_group")()


def _fitting(values: dict[str, Any], model: Any) -> dict[str, Any]:
    """The JSON without what the libraries put there and zero need not be told, or would refuse."""
    section = values.get("zero_optimization") or {}
    number = section.get("stage", 0) if isinstance(section, Mapping) else 0
    gone = ("offload_param", "offload_optimizer") if number == 0 else ("offload_param",) * (number in (1, 2))
    without = {"checkpoint": ("use_node_local_storage",), "zero_optimization": gone}
    for name, keys in without.items():
        here = values.get(name)
        for key in keys if isinstance(here, Mapping) else ():
            value = here.get(key)
            if value and not (isinstance(value, Mapping) and value.get("device") in (None, "none")):
                log_once(logging.WARNING, f"{name}.{key} is left out: {_WHY[key]}")
                values[name] = here = {other: value for other, value in here.items() if other != key}
    state = sys.modules.get("accelerate.state")
    told = getattr(state and state.AcceleratorState._shared_state.get("parallelism_config"), "tp_size", 1)
    if told not in (None, 1, (values.get("tensor_parallel") or {}).get("autotp_size")):
        raise ValueError(
            f"ParallelismConfig(tp_size={told}): Accelerate reads the JSON when it saves; say "
            f'"tensor_parallel": {{"autotp_size": {told}}} there, too'
        )
    values = _with_whole_head(_sharing_batches(values, dist.get_world_size()), model)
    if isinstance(model, nn.Module) and not any(param.requires_grad for param in model.parameters()):
        values = {key: value for key, value in values.items() if key not in ("optimizer", "scheduler")}
    return values


def _with_whole_head(values: dict[str, Any], model: Any) -> dict[str, Any]:
    """The JSON with the head left whole of a model in which TRL multiplies by its weight, and does not call it."""
    cut = isinstance(model, nn.Module) and max(json_sizes(values).values(), default=1) > 1
    own: set[int] = set()
    for each in model.modules() if cut else ():
        forward = getattr(each.__dict__.get("forward"), "__func__", None)
        if getattr(forward, "__globals__", {}).get("__name__") == "trl.trainer.utils":
            own |= {id(param) for param in each.get_output_embeddings().parameters()}
    if not own:
        return values
    named = [name for name, each in model.named_parameters(remove_duplicate=False) if id(each) in own]
    log_once(logging.INFO, f"{', '.join(named)}: whole on all ranks, as TRL multiplies by the weight itself")
    given = dict(values["tensor_parallel"].get("partition_config") or {})
    whole = {"patterns": [re.escape(name) for name in named], "partition_type": "skip"}
    given["layer_specs"] = [whole, *given.get("layer_specs", ())]  # the first that matches holds
    return values | {"tensor_parallel": {**values["tensor_parallel"], "partition_config": given}}
