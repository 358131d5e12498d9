"""The ranks as a mesh of two axes: along *shard* state is cut, along *replica* it is repeated.

Stage 0 is a mesh whose shard axis has size 1, stages 1 to 3 one whose replica axis has, and HSDP (MiCS) has both;
nothing else in the core asks for the stage. Ranks that share a shard group are consecutive, so that along the *data*
axis, which is both together, rank number = place along replica x size of shard + place along shard.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zero.core.torch_private import nccl_options
from zero.log import log_once
from zero.memory.streams import record_event
from zero.plan.grid import Grid
from zero.plan.sharding import Sharding, summed_here
from zero.watchdog.device_waits import DeviceWaits
from zero.watchdog.hang_report import Phase
from zero.watchdog.watchdog import Watchdog

MARGIN = 60.0  # seconds that a process group waits longer than the watchdog
MAX_TIMEOUT = 1e7  # seconds, four months; what gloo can count ends later


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    group: the process group along it, None for an axis of one rank;
    rank:  this process's place along it, of `size`;
    native: NCCL carries its messages: take the backend's own reduce-scatter and all-gather;
    watchdog: watches its waits;
    ranks: the global ranks along it, in order;
    second: with NCCL, another communicator of the same ranks, for reductions, which are not to wait for gathers;
    summed_here: with NCCL, elements of up to so many bytes are added up here, in the order of ranks, not by it.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int
    native: bool
    watchdog: Watchdog = field(default_factory=Watchdog)
    ranks: tuple[int, ...] = (0,)
    second: dist.ProcessGroup | None = None
    summed_here: int = 0

    @property
    def ordered(self) -> bool:
        """Whether all ranks must begin collectives in one order: NCCL wants that, and so does a check of the order.

        Our messages over gloo find each other by their tags.
        """
        return self.size > 1 and (self.native or self.watchdog.order is not None)


@dataclass(frozen=True)
class Mesh:
    """The axes that a unit is shared along.

    shard, replica: see the module;
    data:      all ranks of both, for what concerns the whole of them: norms, agreement, the mean of gradients;
    secondary: with hpZ, the ranks of this node, which hold a second copy of the parameters cut among them, or None;
    across:    with hpZ, the ranks with the same place in the other nodes, this one included, or None.
    """

    shard: Axis
    replica: Axis
    data: Axis
    secondary: Axis | None = None
    across: Axis | None = None

    @property
    def global_rank(self) -> int:
        """This process's rank in the default process group, the one that messages name."""
        return self.data.ranks[self.data.rank]

    @property
    def span(self) -> int:
        """Which of `data.size` equal spans of a flat buffer this rank counts in norms and writes to checkpoints.

        It lies inside the rank's shard, and no other rank has the same.
        """
        return self.shard.rank * self.replica.size + self.replica.rank

    def by_span(self, values: torch.Tensor) -> torch.Tensor:
        """Values of each rank along `data`, [data.size, ...], in the order of their spans."""
        return values.unflatten(0, (self.replica.size, self.shard.size)).transpose(0, 1).flatten(0, 1)

    @property
    def watchdog(self) -> Watchdog:
        """Watches the waits along all axes."""
        return self.data.watchdog


def make_mesh(
    sharding: Sharding,
    timeout: float = math.inf,
    check_order: bool = False,
    group: dist.ProcessGroup | None = None,
    shard_size: int = 0,
    secondary_size: int = 1,
    reduce: str = "auto",
) -> Mesh:
    """The mesh of a process group, by default that of all (one process without one), under `sharding`; collective.

    timeout: seconds that a wait for other ranks may last; check_order: note the order of collectives;
    shard_size: ranks that state is cut over, a divisor of the group's size; 0 for all of them;
    secondary_size: ranks of a node for hpZ, a divisor of the group's size; 1 for none;
    reduce: `zero.reduce`: see `summed_here`.
    """
    if not dist.is_initialized():
        return mesh_of_one()
    group = group or dist.group.WORLD
    size, rank, device = dist.get_world_size(group), dist.get_rank(group), local_device()
    backend = backend_of(group, device)
    ranks = tuple(dist.get_process_group_ranks(group))
    watchdog, native = Watchdog(ranks[rank]), backend == "nccl"
    data = Axis(group, size, rank, native, watchdog, ranks)
    point = Axis(None, 1, 0, native, watchdog, (ranks[rank],))
    if size == 1:
        return Mesh(data, point, data)
    if device.type != "cpu" and not native:
        log_once(logging.WARNING, slow_backend(device, backend))
    watchdog.start(ranks, group, timeout, DeviceWaits(partial(record_event, device)) if native else None)
    try:
        number, per_node = _agreed(data, shard_size, secondary_size)
        watchdog.store.renumber(number)
        inner = (shard_size or size) if sharding.optim else 1
        if native:  # NCCL's own time-out, which ends the process, is to come after our report
            group.set_timeout(_time_limit(timeout))
        if native and inner in (1, size):
            data = replace(data, second=_group(data, [tuple(range(size))], timeout))
        shard, replica = (_with_sums(axis, reduce, per_node) for axis in _two(data, point, inner, timeout, native))
        secondary, across = _two(data, point, secondary_size, timeout) if secondary_size > 1 else (None, None)
    except BaseException:
        watchdog.close()
        raise
    watchdog.order = [] if check_order else None
    return Mesh(shard, replica, data, secondary, across)


def _with_sums(axis: Axis, reduce: str, per_node: int) -> Axis:
    """The axis, and what is summed along it here; ranks are numbered by node, `per_node` on each (0: not known)."""
    together = bool(per_node) and axis.ranks[0] // per_node == axis.ranks[-1] // per_node
    return replace(axis, summed_here=summed_here(reduce, together))


def _agreed(data: Axis, shard_size: int, secondary_size: int) -> tuple[int, int]:
    """The highest number that a rank has for the engine that is being made; ranks on each node, 0 if that differs.

    A rank may have begun one that others never came to; and ranks of one group may be in different other ones. Raises
    RuntimeError where the ranks differ in the sizes: they would make different process groups, and wait for each other.
    """
    watchdog, sizes = data.watchdog, {"shard_size": shard_size, "zero_hpz_partition_size": secondary_size}
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mine = [watchdog.number, per_node, -per_node, *sizes.values(), *(-size for size in sizes.values())]
    highest = torch.tensor(mine, device=local_device() if data.native else "cpu")
    with watchdog.call(Phase.INITIALIZE):
        collective = watchdog.begin("comparison")
        with watchdog.sending(collective):
            work = dist.all_reduce(highest, dist.ReduceOp.MAX, group=data.group, async_op=True)
        watchdog.wait((work,), collective, on_host=True)
        number, most_here, least_here, *most = highest.tolist()
        for (name, size), high, low in zip(sizes.items(), most, most[len(sizes) :], strict=False):
            if high != -low:
                raise RuntimeError(
                    f"the ranks do not initialize the same engine: {name} is {size} on rank {data.ranks[data.rank]}, "
                    f"and from {-low} to {high} on all"
                )
    return number, most_here if most_here == -least_here else 0


def _two(data: Axis, point: Axis, inner: int, timeout: float, reduces: bool = False) -> tuple[Axis, Axis]:
    """The axis along `inner` consecutive ranks, and the one across such groups; makes process groups where needed."""
    if inner in (1, data.size):
        return (point, data) if inner == 1 else (data, point)
    grid = Grid(data.size, {"dp_replicate": data.size // inner, "dp_shard": inner})
    return tuple(_subgroup(data, grid.lists(name), timeout, reduces) for name in ("dp_shard", "dp_replicate"))


def _subgroup(data: Axis, lists: Sequence[tuple[int, ...]], timeout: float, reduces: bool) -> Axis:
    """The axis along the group of this rank among `lists`, places along `data`; collective over all of `data`."""
    (own,) = [places for places in lists if data.rank in places]
    group = _group(data, lists, timeout)
    second = _group(data, lists, timeout) if reduces else None
    ranks = tuple(data.ranks[place] for place in own)
    return Axis(group, len(own), own.index(data.rank), data.native, data.watchdog, ranks, second)


def _group(data: Axis, lists: Sequence[tuple[int, ...]], timeout: float) -> dist.ProcessGroup:
    """A new group of this rank's places among `lists`; collective over all of `data`."""
    (own,) = [places for places in lists if data.rank in places]
    options: dict[str, Any] = {"timeout": _time_limit(timeout)}
    if data.native:
        options["pg_options"] = nccl_options(options["timeout"])
    if data.group is dist.group.WORLD:  # every rank makes every group, in one order
        made = {places: dist.new_group(list(places), **options) for places in lists}
        group = made[own]
    else:
        backend = dist.get_backend_config(data.group)
        group = group_of_members([data.ranks[place] for place in own], backend=backend, **options)
    data.watchdog.own(group)
    return group


def group_of_members(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """A new group that only its ranks make; the others know nothing of it. `options`: of `torch.distributed.new_group`.

    Where the default group is bound to a device, torch would split a new communicator off its own, and wait for all.
    """
    world = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True, **options)
    finally:
        world.bound_device_id = device


def _time_limit(timeout: float) -> timedelta:
    return timedelta(seconds=min(timeout + MARGIN, MAX_TIMEOUT))


def mesh_of_one() -> Mesh:
    """The mesh of a process that shares nothing with others, also where there is a process group."""
    alone = Axis(None, 1, 0, False, ranks=(dist.get_rank() if dist.is_initialized() else 0,))
    return Mesh(alone, alone, alone)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that carries a group's messages of tensors on `device`, "" where none does.

    A group that was made without naming a backend, or with several ("cpu:gloo,cuda:nccl"), has one per device.
    """
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return backends.get(device.type, "")


def slow_backend(device: torch.device, backend: str) -> str:
    """What to say of a model on a GPU whose messages are not sent by NCCL."""
    return (
        f"the model is on {device.type} and the process group sends over {backend or 'no backend of that device'}: "
        "each gather and each reduction is copied to host memory, sent from there, and copied back, which costs "
        'several times the time that NCCL takes; call init_process_group("nccl"), or without naming a backend'
    )


def local_device() -> torch.device:
    """The GPU of this process (LOCAL_RANK, wrapped round when ranks share GPUs), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
