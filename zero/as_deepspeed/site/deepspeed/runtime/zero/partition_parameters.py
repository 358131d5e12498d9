"""Parameters that are cut, by DeepSpeed's names. Importing this gives `torch.nn.Parameter` the names `ds_...`."""

import contextlib
import enum
import inspect
import itertools
import logging
import math
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator as get_accelerator
from deepspeed.comm import _engines, init_distributed
from torch import distributed as dist
from torch import nn

import zero
from zero.config.read import read
from zero.config.unavailable import lookup
from zero.core import released as _released
from zero.core.access import LostWrite
from zero.core.init.deferred_param import DeferredParam
from zero.core.owner import is_released, owner_of
from zero.log import log_once
from zero.parallel.tensor.told_sizes import DTYPES

# Transformers puts functions of its own here while it builds a model; zero's Init patches no constructors.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """`fn` itself."""
    return fn


def _sharing_batches(values: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The JSON with a batch that Transformers has multiplied by all ranks, also those that share theirs, put right."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, steps, train = (values.get(name) for name in names)
    tp = (values.get("tensor_parallel") or {}).get("autotp_size", 1)
    known = all(type(size) is int for size in (micro, steps, train, tp))
    if not known or tp < 2 or train != math.prod((micro, steps, ranks)):
        return values
    log_once(logging.INFO, f"train_batch_size is taken as {train // tp}: {tp} ranks share each batch")
    return values | {"train_batch_size": train // tp}


class ZeroParamStatus(enum.Enum):
    """Where the values of a parameter are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init(zero.Init):
    """`zero.Init`, which rounds to the 16-bit dtype of the JSON unless `dtype` or ZERO_INIT_AS_BUILT=1 says otherwise.

    So parameters have the dtype in which programs for DeepSpeed expect them; masters are then as exact as theirs.
    """

    _init_weights = None  # of Transformers, while it suppresses nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(zero.Init).bind(*args, **kwargs).arguments
        if given.get("enabled", True):
            init_distributed()
            _initialize_whole()
            models = sys.modules.get("transformers.modeling_utils")
            self._init_weights = models and models.PreTrainedModel.init_weights
            for name in {"config", "config_dict_or_path"} & {key for key, value in given.items() if value is not None}:
                given[name] = _sharing_batches(read(given[name]).values, dist.get_world_size())
            source = given.get("config", given.get("config_dict_or_path"))
            if source is not None and given.get("dtype") is None and os.environ.get("ZERO_INIT_AS_BUILT") != "1":
                on = (lookup(read(source).values, f"{name}.enabled") is True for name in DTYPES)
                given["dtype"] = next(itertools.compress(DTYPES.values(), on), None)
        super().__init__(**given)

    def __enter__(self) -> Any:
        if self._init_weights is not None:
            _draw(self._init_weights)
        return super().__enter__()


def _draw(init_weights: Callable[..., None]) -> None:
    """Have Transformers draw the weights of a model that it does not load, in the order of a plain one.

    While it builds a model at stage 3 it suppresses torch's draws, and its own come later: the same seed gives others.
    """
    initialization = sys.modules.get("transformers.initialization")
    if initialization is None:  # Transformers 4, which suppresses nothing where it loads no file
        return
    model = sys.modules["transformers.modeling_utils"].PreTrainedModel
    both = ("init_weights", "tie_weights")  # it replaces the second where it loads
    replaced = [each for each in both if getattr(model, each).__module__ == initialization.__name__]
    if replaced == ["init_weights"]:  # until its context ends, which puts back what was there before
        model.init_weights = init_weights
        for module in filter(None, map(sys.modules.get, initialization.TORCH_MODULES_TO_PATCH)):
            for name in vars(module).keys() & initialization.TORCH_INIT_FUNCTIONS.keys():
                setattr(module, name, initialization.TORCH_INIT_FUNCTIONS[name])


def _initialize_whole() -> None:
    """Have Transformers initialize cut models as plain ones: what it gathers for that is less than models write to."""
    models, own = map(sys.modules.get, ("transformers.modeling_utils", "transformers.integrations.deepspeed"))
    if models is None or own is None or (plain := models.PreTrainedModel.initialize_weights).__module__ == __name__:
        return

    def initialize_weights(self: Any) -> None:
        cut = own.is_deepspeed_zero3_enabled()
        json = _sharing_batches(own.deepspeed_config(), dist.get_world_size()) if cut else None
        with zero.Init(config=json, enabled=cut):
            plain(self)

    models.PreTrainedModel.initialize_weights = initialize_weights
    own.initialize_weights_zero3 = initialize_weights
    if (converted := getattr(own, "_apply_weight_conversions_to_state_dict", None)) is not None:
        own._apply_weight_conversions_to_state_dict = _before_cuts(converted, own)


def _before_cuts(converted: Callable[..., Any], own: Any) -> Callable[..., Any]:
    """Have Transformers convert weights that it loads, which it refuses with autotp_size: layers are cut later here."""

    def convert(*args: Any) -> Any:
        said = own.deepspeed_config
        own.deepspeed_config = lambda: {key: each for key, each in (said() or {}).items() if key != "tensor_parallel"}
        try:
            yield from converted(*args)
        finally:
            own.deepspeed_config = said

    return convert


class GatheredParameters(zero.GatheredParameters):
    """`zero.GatheredParameters`, in which a change that is lost is a warning, once for each place, as in DeepSpeed.

    Programs merge and unmerge adapters in such a block. Where parameters are not resharded, the change stays. With
    `zero_optimization.enable_sanity_checks` in the JSON of their engine it is an error.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        except LostWrite as lost:
            strict = [each._sharded for each in _engines if each._sharded and each.is_sanity_checks_enabled()]
            if any(unit in sharded.units for sharded in strict for unit in self._units):
                raise
            if lost.resharded:
                caller = sys._getframe(1)
                log_once(logging.WARNING, f"{caller.f_code.co_filename}:{caller.f_lineno}: {lost}")


class ParameterOffload:
    """What TRL takes hooks off around `generate`, and puts them on again: nothing, ours do not stand in the way."""

    def __init__(self) -> None:
        self.module = nn.Module()
        self.module.ds_external_parameters = tuple  # none
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Has nothing to put on again."""


def _cpu(self: _released.Placeholder, *args: Any) -> torch.Tensor:
    """`Tensor.cpu` of a state_dict: the values where TRL tells models apart by a hash of them, on all ranks alike."""
    param = None if self.source is None else self.source[0]()
    if param is None or sys._getframe(1).f_code.co_name != "hash_module":
        return torch.Tensor.cpu(self, *args)
    with zero.GatheredParameters(param):
        return param.detach().to("cpu", copy=True)


def _reduce(self: _released.Placeholder, protocol: Any) -> Any:
    """Let programs save a state_dict that they save again with its values, as DeepSpeed-Chat does on rank 0 alone."""
    log_once(logging.WARNING, "a state_dict of cut parameters is saved: the file has no values and cannot be loaded")
    return _released.unsaved, (self.parameter,)


_released.Placeholder.cpu, _released.Placeholder.__reduce_ex__ = _cpu, _reduce


def _attribute(name: str, value: Callable[[nn.Parameter], Any] | str) -> property:
    def get(param: nn.Parameter) -> Any:
        owner = owner_of(param)
        if owner is None or not owner.unit.resharded:
            raise AttributeError(f"'{type(param).__name__}' object has no attribute '{name}': it is not cut", name=name)
        if isinstance(value, str):
            raise AttributeError(f"{name} of a parameter is not in zero, which is here as deepspeed: {value}")
        return value(param)

    return property(get, doc=f"DeepSpeed's `{name}` of a parameter that is cut.")


def _shard(param: nn.Parameter) -> torch.Tensor:
    """A copy of what this rank keeps of it, flat: [n], n may be 0. Writing to it changes nothing."""
    owner = owner_of(param)
    unit = owner.unit
    unit.shard.settle()
    if problem := unit.absence():
        raise problem
    if unit.shard.values is None:
        raise AttributeError("ds_tensor: the parameter is being built, and is whole on every rank", name="ds_tensor")
    part = unit.plan.layout.fragment(unit.plan.params[owner.index].name, unit.shard.window)
    built = isinstance(unit, DeferredParam)  # its shard lies there, and nothing else
    with torch.no_grad(), contextlib.nullcontext() if built else unit.shard.acquired():
        return unit.shard.values.narrow(0, part.at, part.numel).clone()


# What each is of a parameter, or what to use instead.
_ATTRIBUTES = {
    "ds_id": lambda param: id(param),
    "ds_shape": lambda param: param.shape,
    "ds_numel": lambda param: param.numel(),
    "ds_status": lambda param: ZeroParamStatus.NOT_AVAILABLE if is_released(param) else ZeroParamStatus.AVAILABLE,
    "ds_persist": lambda param: owner_of(param).unit.persistent,
    "ds_active_sub_modules": lambda param: set(),
    "partition_numel": lambda param: lambda: -(-param.numel() // owner_of(param).unit.mesh.data.size),
    "ds_tensor": _shard,
    "all_gather": "deepspeed.zero.GatheredParameters(param)",
    "partition": "deepspeed.zero.GatheredParameters(param), which cuts it on leaving",
}
for _name, _value in _ATTRIBUTES.items():
    setattr(nn.Parameter, _name, _attribute(_name, _value))
