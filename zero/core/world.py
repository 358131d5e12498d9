"""The world: all ranks of the job that one engine spans.

Over it go the norm, overflow, agreement, the watchdog, the data of a checkpoint and the choice of who writes it. The
ranks that share one unit are its mesh (zero/core/mesh.py).
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zero.core.comm import Axis, backend_of, local_device
from zero.core.torch_private import group_of_members, nccl_options
from zero.log import log_once
from zero.memory.streams import record_event
from zero.watchdog.device_waits import DeviceWaits
from zero.watchdog.hang_report import Phase
from zero.watchdog.watchdog import Watchdog

MARGIN = 60.0  # seconds that a process group waits longer than the watchdog
MAX_TIMEOUT = 1e7  # seconds, four months; what gloo can count ends later


@dataclass(frozen=True)
class World(Axis):
    """All ranks of the engine; `rank` is the place among them.

    per_node: how many of them are on each node, numbered one node after the other; 0 where that is not known.
    """

    per_node: int = 0

    @property
    def writes(self) -> bool:
        """Whether this rank writes the files of which the job has one."""
        return self.rank == 0

    def point(self) -> Axis:
        """The axis of this rank alone."""
        return Axis(None, 1, 0, self.native, self.watchdog, (self.global_rank,))

    def new_group(self, places: Sequence[int], timeout: float, purpose: str) -> dist.ProcessGroup:
        """A new group of the ranks at these places, this one among them; collective over those."""
        ranks = [self.ranks[place] for place in places]
        options: dict[str, Any] = {"timeout": _time_limit(timeout)}
        if self.native:
            options["pg_options"] = nccl_options(options["timeout"])
        if self.group is not dist.group.WORLD:
            options["backend"] = dist.get_backend_config(self.group)
        # The number tells engines apart that only some of the ranks have come to make; other worlds have the same.
        group = group_of_members(f"{purpose} of engine {self.watchdog.number} of {self.ranks}", ranks, **options)
        self.watchdog.own(group)
        return group


@functools.cache  # once
def outlast_messages() -> None:
    """Have this process end only after gloo's threads have dropped what they have sent.

    For that they take Python's lock, and torch aborts the process where they find it ending (pytorch#190489).
    """
    atexit.register(time.sleep, 0.1)


def make_world(
    timeout: float = math.inf,
    check_order: bool = False,
    group: dist.ProcessGroup | None = None,
    same: dict[str, int] | None = None,
) -> World:
    """The ranks of a process group, by default all (one process without one); collective.

    timeout: seconds that a wait for other ranks may last; check_order: note the order of collectives;
    same: sizes, by name, in which the ranks must not differ. Raises RuntimeError where they do.
    """
    if not dist.is_initialized():
        return world_of_one()
    outlast_messages()
    group = group or dist.group.WORLD
    size, rank, device = dist.get_world_size(group), dist.get_rank(group), local_device()
    backend = backend_of(group, device)
    ranks = tuple(dist.get_process_group_ranks(group))
    watchdog, native = Watchdog(ranks[rank]), backend == "nccl"
    world = World(weakref.ref(group), size, rank, native, watchdog, ranks)
    if size == 1:
        return world
    if device.type != "cpu" and not native:
        log_once(logging.WARNING, slow_backend(device, backend))
    watchdog.start(ranks, group, timeout, DeviceWaits(partial(record_event, device)) if native else None)
    try:
        number, per_node = _agreed(world, same or {})
        watchdog.barrier.renumber(number)
        if native:  # NCCL's own time-out, which ends the process, is to come after our report
            group.set_timeout(_time_limit(timeout))
    except BaseException:
        watchdog.close()
        raise
    watchdog.order = [] if check_order else None
    return replace(world, per_node=per_node)


def axis_of(group: dist.ProcessGroup) -> Axis:
    """The ranks of a group that the program has made, outside of any engine."""
    rank, ranks = dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
    native = backend_of(group, local_device()) == "nccl"
    return Axis(weakref.ref(group), len(ranks), rank, native, Watchdog(dist.get_rank()), ranks)


def _agreed(world: World, same: dict[str, int]) -> tuple[int, int]:
    """The highest number that a rank has for the engine that is being made; ranks on each node, 0 if that differs.

    A rank may have begun one that others never came to; and ranks of one group may be in different other ones. Raises
    RuntimeError where the ranks differ in the sizes: they would make different process groups, and wait for each other.
    """
    watchdog = world.watchdog
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mine = [watchdog.number, per_node, -per_node, *same.values(), *(-size for size in same.values())]
    highest = torch.tensor(mine, device=local_device() if world.native else "cpu")
    with watchdog.call(Phase.INITIALIZE):
        collective = watchdog.begin("comparison of engines", ranks=world.ranks)
        with watchdog.sending(collective):
            work = dist.all_reduce(highest, dist.ReduceOp.MAX, group=world.group, async_op=True)
        watchdog.wait((work,), collective, on_host=True)
        number, most_here, least_here, *most = highest.tolist()
        for (name, size), high, low in zip(same.items(), most, most[len(same) :], strict=False):
            if high != -low:
                raise RuntimeError(
                    f"the ranks do not initialize the same engine: {name} is {size} on rank {world.global_rank}, "
                    f"and from {-low} to {high} on all"
                )
    return number, most_here if most_here == -least_here else 0


def _time_limit(timeout: float) -> timedelta:
    return timedelta(seconds=min(timeout + MARGIN, MAX_TIMEOUT))


def world_of_one() -> World:
    """The world of a process that shares nothing with others, also where there is a process group."""
    return World(None, 1, 0, False, ranks=(dist.get_rank() if dist.is_initialized() else 0,))


def slow_backend(device: torch.device, backend: str) -> str:
    """The warning about a model on a GPU whose messages are not sent by NCCL."""
    return (
        f"the model is on {device.type} and the process group sends over {backend or 'no backend of that device'}: "
        "each gather and each reduction is copied to host memory, sent from there, and copied back, which costs "
        'several times the time that NCCL takes; call init_process_group("nccl"), or without naming a backend'
    )
