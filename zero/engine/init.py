"""Building a model that does not fit whole."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero.config import load
from zero.config.file import File
from zero.config.grid_sizes import Told, grid_of
from zero.config.sections import TIMEOUT
from zero.core.comm import local_device
from zero.core.init.builder import Builder, running
from zero.core.init.deferred_param import DeferredParam, ShardStorage
from zero.core.mesh import Meshes, mesh_of_one
from zero.core.owner import owner_of
from zero.core.world import make_world
from zero.engine.arguments import launched_config, only_one
from zero.engine.assignment import assigned_run
from zero.engine.data_ranks import data_ranks
from zero.engine.joining import init_distributed
from zero.plan.grid import DENSE, Grid
from zero.plan.sharding import Sharding

_DATA_PARALLEL = "groups are made from the configuration, as by sequence_parallel_size; leave it out"
_QUANTIZED = "what travels in 8 bits the configuration of the engine says: zero_optimization.zero_quantized_weights"


class Init:
    """Inside the block, each parameter is cut over the ranks as soon as the module that owns it is complete.

        with zero.Init():
            model = Model()
        engine, *_ = zero.initialize(model=model, ...)

    A rank holds its shard of what is built, and the parameters of about one module whole. All ranks must build the
    same; rank 0's values count. The code of the model is as for plain torch: any code that reads or writes a parameter
    that was cut gets it back (`nn.init`, `.data`, tying, `apply`), so weights are bitwise those of plain
    construction with the same seed. Random numbers are drawn as without us, and on the device the code says.

    More than one module is whole at a time where code keeps views of several parameters, and where it makes modules
    without registering them in a parent at once: of plain layers in a list, two; of `copy.deepcopy(block)` in a
    list, all until the list is registered. Buffers are left alone. After the block parameters are released: they
    are read and written inside `zero.GatheredParameters`, and pickling raises RuntimeError with the name of one;
    `state_dict()` has names, shapes and dtypes, and `copy.deepcopy` gives a model that is cut in the same way. In a
    later block the model may be changed as in the one it was built in: adapters added, embeddings resized. With one
    rank nothing is cut.

    `zero.initialize` takes such a model over on any stage, one unit at a time, also when parts of it are plain or
    come from another block, and also inside the block. Modules that are attached to the model of an engine later
    run in its forward; the engine neither trains nor cuts them, so build them without `Init`.

    module:        a module that was built before: it is cut in place at once, and no block is needed;
    config_dict_or_path, config: the JSON, default that of `zero run --config`; with a stage below 3 in it there is
                   nothing to do;
    enabled:       False: do nothing;
    dtype:         round floating-point parameters to this dtype when the block ends. Default: as built, so that the
                   masters are exact whatever the JSON computes in; DeepSpeed takes the JSON's 16-bit dtype here;
    remote_device: "cpu" or "nvme": shards lie in main memory until `initialize` takes them, which then puts them where
                   the JSON says; default: on this rank's device;
    pin_memory:    page-lock them there;
    data_parallel_group: the ranks that the shards are cut over; default: all;
    mpu:           Megatron's object, whose data-parallel group is taken;
    mesh_param:    sizes of axes, as of `zero.initialize`, where the configuration does not say them;
    mem_efficient_linear: accepted, without effect.

    A block inside of another has no effect of its own. If the block raises, what was not cut yet becomes plain
    again. Raises ValueError for the other arguments, and ConfigError for the JSON.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | torch.device | None = None,
        pin_memory: bool = False,
        config_dict_or_path: str | PathLike | Mapping[str, Any] | None = None,
        config: str | PathLike | Mapping[str, Any] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
        mesh_param: Any = None,
    ) -> None:
        only_one("Init", mpu=mpu, data_parallel_group=data_parallel_group, mesh_param=mesh_param)
        _, source = only_one("Init", config=config, config_dict_or_path=config_dict_or_path)
        if not isinstance(data_parallel_group, dist.ProcessGroup | None):
            raise ValueError(f"Init(data_parallel_group=...): got {data_parallel_group!r}; wanted a process group")
        _refuse(_DATA_PARALLEL, zero_param_parallel_group=zero_param_parallel_group)
        _refuse(_DATA_PARALLEL, sequence_data_parallel_group=sequence_data_parallel_group)
        _refuse(_QUANTIZED, zero_quantized_weights=zero_quantized_weights)
        _refuse(_QUANTIZED, zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights)
        _refuse("shards lie on the device or, with remote_device='cpu', in main memory", param_swapper=param_swapper)
        _refuse("tensors are built as the code says; see dtype and remote_device", tensor_overrides=tensor_overrides)
        if module is not None and not isinstance(module, nn.Module):
            raise ValueError(f"Init(module=...): got {type(module).__name__}; wanted a torch.nn.Module")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"Init(dtype=...): got {dtype!r}; wanted a floating-point torch.dtype")
        self._storage = _storage_of(remote_device, pin_memory)
        self._timeout = TIMEOUT
        self._dtype = dtype
        self._builders: list[Builder | None] = []  # of the blocks that are open, None where there is nothing to do
        self._enabled = bool(enabled)
        if not enabled:
            return
        init_distributed()
        data = data_ranks(mesh_param=mesh_param, mpu=mpu)
        self._group, self._grid = data_parallel_group or data.group, None
        if data.sizes:
            self._grid = grid_of(File(), data.size, Told(data.sizes, data.source))[0]
        source = launched_config() if source is None else source
        if source is not None:
            self._configure(source, Told(data.sizes, data.source))
        if module is not None and self._enabled:
            self._convert(module)

    def __enter__(self) -> None:
        builder = self._builder() if self._enabled and running() is None else None
        self._builders.append(builder)
        if builder is not None:
            builder.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        builder = self._builders.pop()
        if builder is not None:
            builder.finish(failed=kind is not None)

    def _builder(self) -> Builder:
        if assigned_run().plain:  # plain torch has nothing cut, and takes rank 0's values by itself
            return Builder(lambda axes: mesh_of_one(), self._storage, self._dtype)
        world = make_world(self._timeout, group=self._group)
        sharding, sizes = Sharding(optim=True, grads=True, params=True), {}
        if self._grid is not None:  # shards lie on all data ranks, also where an engine will repeat them
            sizes = {axis: self._grid.size(axis) for axis in ("pp", "cp", "tp")}
        ep = 1 if self._grid is None else self._grid.size("ep")
        whole, cut = (
            Meshes(world, Grid(world.size, each, ep), sharding, timeout=self._timeout)
            for each in (sizes | {"tp": 1}, sizes)
        )
        # What no code says to be cut is whole until an engine cuts it: until then all ranks have shards of it.
        return Builder(lambda axes: (whole if axes == DENSE else cut).of(axes), self._storage, self._dtype)

    def _configure(self, source: str | PathLike | Mapping[str, Any], told: Told) -> None:
        world_size = dist.get_world_size(self._group) if dist.is_initialized() else 1
        settings = load(source, world_size, told, filled=False)
        self._grid, self._timeout = settings.grid, settings.zero.timeout
        section = settings.zero_optimization
        self._enabled = Sharding.of_stage(section.stage).params
        place = section.offload_param.device
        if place not in (None, "none"):
            self._storage = _storage_of(
                place, section.offload_param.pin_memory, "zero_optimization.offload_param.device"
            )

    def _convert(self, module: nn.Module) -> None:
        for name, param in module.named_parameters():
            owner = owner_of(param)
            if owner is not None and not isinstance(owner.unit, DeferredParam):
                raise ValueError(f"Init(module=...): parameter '{name}' belongs to an engine; call its destroy() first")
        (running() or self._builder()).convert(module)


def _refuse(reason: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False and value != []:
            raise ValueError(f"Init({name}=...): got {value!r}; {reason}")


def _storage_of(place: str | torch.device | None, pinned: bool, name: str = "Init(remote_device=...)") -> ShardStorage:
    device = local_device()
    if place in (None, "none"):
        return ShardStorage(device)
    if place == "nvme":
        # For a short while, and not for copies: the files are those of an engine.
        return ShardStorage(torch.device("cpu"))
    try:
        wanted = torch.device(place)
    except (RuntimeError, TypeError):
        raise ValueError(f"{name}: got {place!r}; wanted None, 'cpu' or '{device.type}'") from None
    if wanted.type not in ("cpu", device.type):
        raise ValueError(f"{name}: got {place!r}; this rank's device is '{device}'; wanted None or 'cpu'")
    return ShardStorage(device if wanted.type == device.type else wanted, bool(pinned))
