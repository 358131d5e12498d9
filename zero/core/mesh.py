"""Ranks as a mesh of two axes: along *shard* state is cut, along *replica* it is repeated.

Stage 0 is a mesh whose shard axis has size 1, stages 1 to 3 one whose replica axis has; nothing else in the
core asks for the stage.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zero.plan.sharding import Sharding
from zero.watchdog.hang_report import Phase
from zero.watchdog.watchdog import Watchdog


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh: the process group along it, its size, this process's place on it, who minds its waits."""

    group: dist.ProcessGroup | None
    size: int
    rank: int
    native: bool  # NCCL: take the backend's own reduce-scatter and all-gather
    watchdog: Watchdog = field(default_factory=Watchdog)

    @property
    def ordered(self) -> bool:
        """Whether all ranks must begin collectives in one order: NCCL wants that, and so does a check of the order.

        Our messages over gloo find each other by their tags.
        """
        return self.size > 1 and (self.native or self.watchdog.order is not None)


@dataclass(frozen=True)
class Mesh:
    """The two axes, and the world they make up."""

    rank: int
    world_size: int
    shard: Axis
    replica: Axis

    @property
    def reduced_over(self) -> Axis:
        """The axis along which there is anybody to add gradients up with; today never both."""
        return self.shard if self.shard.size > 1 else self.replica

    @property
    def watchdog(self) -> Watchdog:
        """Who minds the waits of both axes."""
        return self.shard.watchdog


def make_mesh(
    sharding: Sharding,
    timeout: float = math.inf,
    check_order: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Mesh:
    """The mesh of a process group, by default that of all (one process without one), under `sharding`; collective.

    `timeout`: seconds that a wait for other ranks may last; `check_order`: note the order of collectives.
    """
    if not dist.is_initialized():
        return mesh_of_one()
    group = group or dist.group.WORLD
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    watchdog, native = Watchdog(rank), dist.get_backend(group) == "nccl"
    if size > 1:
        watchdog.start(size, group, timeout, native)
        try:
            watchdog.renumber(_highest(watchdog, group, native))
        except BaseException:
            watchdog.close()
            raise
        watchdog.order = [] if check_order else None
    line, point = Axis(group, size, rank, native, watchdog), Axis(None, 1, 0, native, watchdog)
    shard, replica = (line, point) if sharding.optim else (point, line)
    return Mesh(rank, size, shard, replica)


def _highest(watchdog: Watchdog, group: dist.ProcessGroup, native: bool) -> int:
    """The highest number that a rank of the group has for the engine that is being made.

    A rank may have begun one that others never came to; and ranks of one group may be in different other ones.
    """
    number = torch.tensor(watchdog.number, device=local_device() if native else "cpu")
    with watchdog.call(Phase.INITIALIZE):
        collective = watchdog.begin("comparison")
        with watchdog.sending(collective):
            work = dist.all_reduce(number, dist.ReduceOp.MAX, group=group, async_op=True)
        watchdog.wait((work,), collective)
    return int(number)


def mesh_of_one() -> Mesh:
    """The mesh of a process that shares nothing with others, also where there is a process group."""
    alone = Axis(None, 1, 0, False)
    return Mesh(0, 1, alone, alone)


def local_device() -> torch.device:
    """The GPU of this process (LOCAL_RANK, wrapped round when ranks share GPUs), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
