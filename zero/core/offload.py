"""Gives each unit its home: carves host memory, opens files, and says beforehand what it all takes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zero.core.home import Home
from zero.core.host_sum import HostSum, Landing
from zero.core.lane import Lane
from zero.core.mesh import Mesh
from zero.core.slab import Slab, check_room
from zero.core.store import Resident, Store
from zero.log import rank_zero
from zero.plan.formats import Formats
from zero.plan.host import (
    HostBytes,
    gradient_nbytes,
    host_bytes,
    host_table,
    parameter_nbytes,
    record,
)
from zero.plan.placement import Placement, Where, is_updated, place
from zero.plan.units import UnitPlan


class OffloadSettings(NamedTuple):
    """What `offload_optimizer` and `offload_param` of the JSON say.

    ratio: the part of the trained elements whose state leaves the device, None where that is to be measured;
    max_in_cpu: elements of this rank's shards that stay in memory although `params` says FILE; pinned: page-locked
    memory on a machine with a GPU.
    """

    optimizer: Where = Where.DEVICE
    params: Where = Where.DEVICE
    ratio: float | None = 1.0
    max_in_cpu: int = 0
    pinned: bool = True
    optimizer_folder: str | None = None
    params_folder: str | None = None
    optimizer_buffers: int = 4
    params_buffers: int = 5

    @property
    def enabled(self) -> bool:
        """Whether anything leaves the device."""
        return self.optimizer is not Where.DEVICE or self.params is not Where.DEVICE


class Offload:
    """The homes of all units of one engine, and the memory behind them.

    host: bytes of this rank in host memory and in files.
    """

    def __init__(
        self,
        settings: OffloadSettings,
        plans: Sequence[UnitPlan],
        mesh: Mesh,
        device: torch.device,
        formats: Formats,
        gradients: str,
        accumulate: str,
    ) -> None:
        """Take all memory that will be needed; RuntimeError with a table, on all ranks, where one has too little.

        `gradients`: the dtype in which they rest in host memory; `accumulate`: that in which they add up.
        """
        self._settings = settings
        self._plans = plans
        self._device = device
        self._formats = formats
        self._gradients, self._accumulate = gradients, accumulate
        self._rank, self._parts = mesh.shard.rank, mesh.shard.size
        self._apart = has_own_memory(device)
        self.placements = place(
            plans, self._parts, settings.optimizer, settings.params, settings.ratio, settings.max_in_cpu
        )
        self.host = self._count()
        self._slab = self._take(mesh) if self.host.memory else None
        self._up, self._landing = Lane(device), Landing(device, self._apart)

    def home(self, index: int) -> Home:
        """The home of unit `index`; to be asked for once, in order."""
        plan, placement = self._plans[index], self.placements[index]
        away = placement.optimizer is not Where.DEVICE
        shards_away = placement.params is not Where.DEVICE
        cpu = torch.device("cpu")
        return Home(
            updates=cpu if away else self._device,
            shards=cpu if shards_away else self._device,
            up=self._up,
            away=away,
            shards_away=shards_away,
            mirrored=is_updated(plan) and self._keeps_copy(placement),
            states=self._states(plan, placement),
            kept=self._shard_store(plan, placement),
            gradients=self._sum(plan) if away else None,
        )

    def close(self) -> None:
        """Give the memory back as soon as nobody uses it."""
        if self._slab is not None:
            self._slab.close()

    def describe(self) -> str:
        """What rests off the device on this rank, as a table."""
        return host_table(self.host)

    def _keeps_copy(self, placement: Placement) -> bool:
        away, shards_away = placement.optimizer is not Where.DEVICE, placement.params is not Where.DEVICE
        return placement.params is Where.FILE or (self._apart and away != shards_away)

    def _states(self, plan: UnitPlan, placement: Placement) -> Store:
        if placement.optimizer is Where.DEVICE or not is_updated(plan):
            return Resident()
        kept = record(plan, self._rank, self._parts, self._formats, self._keeps_copy(placement))
        if placement.optimizer is Where.HOST:
            return Resident(self._slab.take(kept.nbytes))
        raise NotImplementedError("files")

    def _shard_store(self, plan: UnitPlan, placement: Placement) -> Store:
        if placement.params is Where.DEVICE:
            return Resident()
        if placement.params is Where.HOST:
            return Resident(self._slab.take(parameter_nbytes(plan, self._parts)))
        raise NotImplementedError("files")

    def _sum(self, plan: UnitPlan) -> HostSum:
        dtype = _DTYPES[self._gradients]
        memory = self._slab.take(gradient_nbytes(plan, self._parts, self._gradients))
        numel = plan.layout.numel // self._parts
        return HostSum(memory[: numel * dtype.itemsize].view(dtype), _DTYPES[self._accumulate], self._landing)

    def _count(self) -> HostBytes:
        return host_bytes(
            self._plans,
            self.placements,
            self._rank,
            self._parts,
            self._formats,
            self._gradients,
            self._apart,
            self._settings.optimizer_buffers,
            self._settings.params_buffers,
        )

    def _take(self, mesh: Mesh) -> Slab:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", str(mesh.world_size)))
        check_room(self.describe(), self.host.memory, ranks_here)
        slab = Slab(self.host.memory, self._device, self._settings.pinned)
        rank_zero(logging.INFO, "host memory of each rank:\n%s", self.describe())
        return slab


def has_own_memory(device: torch.device) -> bool:
    """Whether the device's memory is another than the host's, so that what both use must be copied."""
    return device.type != "cpu"


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
