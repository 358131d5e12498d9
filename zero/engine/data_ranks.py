"""The ranks that an engine's data parallelism spans: all, those of a mesh, or those of Megatron's `mpu`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero.config import Config, ConfigError
from zero.core.torch_private import group_of_members
from zero.engine.arguments import only_one
from zero.plan.grid import DATA, Grid, GridError, by_axis

_NOT_DATA = {"pp", "pipe", "pipeline", "cp", "sp", "sequence", "sequence_parallel", "context", "tp", "tensor", "ep"}
_SEQUENCE_PARALLEL = ("get_sequence_parallel", "get_context_parallel")
_MODEL_PARALLEL = ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")


class DataRanks(NamedTuple):
    """The ranks of an engine as the arguments of a call say them.

    group: their process group, None for the default one, or where there is none;
    size, rank: of the group, and this process's place in it;
    sizes: of axes of their grid, where an argument says them; source: that argument, for messages;
    model_parallel: the ranks of one replica of the model, of which only those of the group are known;
    cuts_sequences: the caller cuts sequences, not the engine; training_only: in eval it has a batch for each rank.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int
    sizes: Mapping[str, int] = MappingProxyType({})
    source: str = ""
    model_parallel: int = 1
    cuts_sequences: bool = False
    training_only: bool = False

    @property
    def shard_size(self) -> int:
        """The number of data ranks that state is sharded over, 0 where no argument says it."""
        return self.sizes.get("dp_shard", 0) * self.sizes.get("cp", 1)

    def place(self, grid: Grid) -> int:
        """This process's place among those that have samples of their own."""
        return grid.ranks(DATA, self.rank).index(self.rank)

    def sharded_over(self, settings: Config) -> int:
        """The ranks that state is sharded over, by the config or the mesh; 0 for all. ConfigError if they differ.

        So too where what `mpu` says contradicts the config.
        """
        stage = settings.zero_optimization.stage
        wrong = []
        if self.shard_size > 1 and stage == 0:
            wrong.append(
                f"{self.source}: got {self.shard_size} ranks to cut state over with zero_optimization.stage 0, where "
                "every rank keeps all state; set the stage to 1, 2 or 3"
            )
        wrong += [
            f"{key}: got {size}, and {self.source} cuts state over {self.shard_size} ranks; keep one of the two"
            for key, size in settings.shard_sizes.items()
            if self.shard_size not in (0, size)
        ]
        if self.shard_size not in (0, self.size) and settings.secondary_shard_size > 1:
            wrong.append(
                f"zero_optimization.zero_hpz_partition_size: got {settings.secondary_shard_size}, and {self.source} "
                f"cuts state over {self.shard_size} of {self.size} ranks; it is for state that is cut over all of them"
            )
        if self.model_parallel > 1 and (settings.gradient_clipping or settings.scales_loss):
            wrong.append(
                f"mpu: got {self.model_parallel} ranks for one replica of the model; the gradient norm and the check "
                "for overflow see the data-parallel group only; set gradient_clipping to 0 and train in bf16 or fp32"
            )
        if wrong:
            raise ConfigError(wrong)
        return self.shard_size or settings.shard_size


def data_ranks(
    mesh_param: Any = None,
    device_mesh: Any = None,
    mpu: Any = None,
    layers_are_cut: bool = False,
    layered: Mapping[str, int] = MappingProxyType({}),
) -> DataRanks:
    """The ranks that the arguments of one call say; collective where a mesh needs a process group of its own.

    layers_are_cut: some parameter is known as a part of a larger one, so that the ranks of `mpu` that share layers are
    taken into the grid, as where layers are to be cut; else each works with the ranks of its data-parallel group only.
    layered: what a PipelineModule says of their grid, or `tp_model_init` and the JSON.

    Raises ValueError for arguments that do not fit together, ConfigError for sizes that do not fit the ranks there are.
    """
    name, value = only_one("initialize()", mesh_param=mesh_param, device_mesh=device_mesh, mpu=mpu)
    known = dist.is_initialized()
    world, rank = (dist.get_world_size(), dist.get_rank()) if known else (1, 0)
    if not name:
        return DataRanks(None, world, rank, layered, "the model" if layered else "")
    if "pp" in layered:
        raise ValueError(f"initialize(): got {name}, and a PipelineModule that says the ranks of its stages; keep one")
    if name == "mpu":
        return _of_mpu(value, layers_are_cut, layered.get("tp", 1))
    if isinstance(value, DeviceMesh):
        return _of_device_mesh(value, name)
    sizes = _sizes(value, name, world)
    return DataRanks(None, world, rank, sizes, f"{name}={value!r}", cuts_sequences=sizes.get("cp", 1) > 1)


def _of_mpu(mpu: Any, layers_are_cut: bool, tp: int) -> DataRanks:
    for start in _SEQUENCE_PARALLEL:
        asked = getattr(mpu, f"{start}_world_size", None)
        if callable(asked) and (size := int(asked())) > 1:
            return _sharing(mpu, getattr(mpu, f"{start}_group")(), size, tp)
    asked = getattr(mpu, "get_data_parallel_group", None)
    if not callable(asked):
        raise ValueError(f"mpu: got a {type(mpu).__name__}; wanted an object with get_data_parallel_group()")
    found = (getattr(mpu, name, None) for name in _MODEL_PARALLEL)
    size = next((int(size()) for size in found if callable(size)), 1)
    if tp not in (1, size):
        raise ValueError(f"mpu: {size} ranks share layers, and tensor_parallel says {tp}; wanted one number")
    if (layers_are_cut or tp > 1) and size > 1:
        world, rank = dist.get_world_size(), dist.get_rank()
        ranks, wanted = dist.get_process_group_ranks(asked()), Grid(world, {"tp": size}).ranks(DATA, rank)
        if ranks != list(wanted):
            raise ValueError(f"mpu: ranks {ranks} share parameters; with tp {size} innermost wanted {list(wanted)}")
        return DataRanks(None, world, rank, {"tp": size}, "mpu")
    return _of_group(asked(), "mpu", {}, size)


def _sharing(mpu: Any, group: dist.ProcessGroup, size: int, tp: int) -> DataRanks:
    """All ranks, of which neighbours share sequences; ValueError for others."""
    world, rank, ranks = dist.get_world_size(), dist.get_rank(), dist.get_process_group_ranks(group)
    if ranks != list(Grid(world, {"cp": size}).ranks("cp", rank)):
        raise ValueError(f"mpu: ranks {ranks} share sequences; wanted {size} neighbours of {world} ranks, in order")
    if tp > 1 or any(callable(one := getattr(mpu, name, None)) and int(one()) > 1 for name in _MODEL_PARALLEL):
        raise ValueError("mpu: got ranks that share layers and ranks that share sequences; wanted one of the two")
    only = getattr(mpu, "disable_in_eval", False)
    return DataRanks(None, world, rank, {"cp": size}, "mpu", cuts_sequences=True, training_only=only)


def _of_group(group: dist.ProcessGroup, source: str, sizes: Mapping[str, int], model_parallel: int = 1) -> DataRanks:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{source}: its data-parallel group does not hold this process (rank {dist.get_rank()})")
    return DataRanks(group, dist.get_world_size(group), rank, sizes, source, model_parallel)


def _of_device_mesh(mesh: DeviceMesh, name: str) -> DataRanks:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 2 or (mesh.ndim == 2 and _NOT_DATA & {str(dim).lower() for dim in names}):
        what = f"dimensions {', '.join(map(repr, names))}" if names else f"{mesh.ndim} dimensions"
        raise ValueError(
            f"{name}: got a mesh of {what}; wanted the data-parallel ones, replicas and then shards: "
            'mesh["dp_replicate", "dp_shard"], or one dimension'
        )
    ranks = mesh.mesh.flatten().tolist()
    if dist.get_rank() not in ranks:
        raise ValueError(f"{name}: its ranks {ranks} do not hold this process (rank {dist.get_rank()})")
    if ranks != sorted(ranks):
        raise ValueError(f"{name}: got ranks in the order {ranks}; wanted them ascending, shards innermost")
    source = f"{name} of shape {tuple(mesh.shape)}"
    sizes = dict(zip(DATA, mesh.shape, strict=True)) if mesh.ndim == 2 else {}
    if len(ranks) == dist.get_world_size():
        return _of_group(dist.group.WORLD, source, sizes)
    # Ranks outside of the mesh know nothing of its group.
    group = mesh.get_group() if mesh.ndim == 1 else group_of_members("mesh", ranks)
    return _of_group(group, source, sizes)


def _sizes(value: Any, name: str, world: int) -> dict[str, int]:
    """Of (replicas, shards), or a mapping from names of axes to sizes, which `world` ranks must make up."""
    if isinstance(value, tuple | list) and len(value) == 2:
        value = dict(zip(DATA, value, strict=True))
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name}: got {value!r}; wanted a DeviceMesh, (replicas, shards), or a mapping such as "
            '{"dp_replicate": 2, "dp_shard": 4}'
        )
    try:
        sizes = by_axis(value)
        ep = sizes.pop("ep", 1)
        shard = {"dp_shard": Grid(world, sizes, ep).size("dp_shard")} if {*DATA} & sizes.keys() else {}
    except GridError as error:
        raise ConfigError([f"{name}: {error}"]) from None
    return {**sizes, **shard, "ep": ep}
