"""Gives each unit its placement: takes host memory, opens files, and says beforehand how much of both."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zero.core.agree import agree
from zero.core.mesh import Mesh
from zero.kernels.aio import Aio
from zero.log import rank_zero
from zero.memory.copy_stream import CopyStream
from zero.memory.host_bytes import (
    HostBytes,
    gradient_nbytes,
    host_bytes,
    host_table,
    keeps_copy,
    parameter_nbytes,
    record,
)
from zero.memory.host_gradients import HostGradAccumulator, StagingBuffers
from zero.memory.pinned_arena import PinnedArena, check_room
from zero.memory.state_placement import StatePlacement
from zero.memory.store import ResidentStore, Store
from zero.memory.swap_file import Requests, SwapFile, close_all
from zero.plan.formats import Formats
from zero.plan.placement import Placement, Where, is_updated, place
from zero.plan.units import UnitPlan


class OffloadSettings(NamedTuple):
    """What `offload_optimizer` and `offload_param` of the JSON say.

    ratio:      the part of the trained elements whose state leaves the device; None: what free memory allows;
    max_in_cpu: elements of this rank's shards that stay in memory although `params` says FILE;
    pinned:     page-locked memory on a machine with a GPU;
    requests:   how drives are accessed; read_ahead and write_behind are those of the optimizer's state.
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
    requests: Requests = Requests()

    @property
    def enabled(self) -> bool:
        """Whether anything leaves the device."""
        return self.optimizer is not Where.DEVICE or self.params is not Where.DEVICE


class Offload:
    """The placements of all units of one engine, and the memory behind them.

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
        self._separate = has_own_memory(device)
        self.placements = place(
            plans, self._parts, settings.optimizer, settings.params, settings.ratio, settings.max_in_cpu
        )
        self.host = self._count()
        self._arena: PinnedArena | None = None
        self._aio: Aio | None = None
        self.swap_files: dict[str, SwapFile] = {}
        self._open(mesh)
        self._copies, self._staging = CopyStream(device), StagingBuffers(device, self._separate)

    def placement(self, index: int) -> StatePlacement:
        """The placement of unit `index`; to be called once for each, in order."""
        plan, placement = self._plans[index], self.placements[index]
        updated_on_host = placement.optimizer is not Where.DEVICE
        shard_offloaded = placement.params is not Where.DEVICE
        cpu = torch.device("cpu")
        return StatePlacement(
            update_device=cpu if updated_on_host else self._device,
            shard_device=cpu if shard_offloaded else self._device,
            copies=self._copies,
            shard_offloaded=shard_offloaded,
            shard_copied=is_updated(plan) and keeps_copy(placement, self._separate),
            state_store=self._state_store(plan, placement),
            shard_store=self._shard_store(plan, placement),
            host_gradients=self._accumulator(plan) if updated_on_host else None,
        )

    def close(self) -> None:
        """Give files and memory back as soon as nobody uses them."""
        close_all(list(self.swap_files.values()), self._aio)
        if self._arena is not None:
            self._arena.close()

    def describe(self) -> str:
        """What rests off the device on this rank, as a table."""
        return host_table(self.host)

    def _state_store(self, plan: UnitPlan, placement: Placement) -> Store:
        if placement.optimizer is Where.DEVICE or not is_updated(plan):
            return ResidentStore()
        nbytes = self._record_nbytes(plan, placement)
        if placement.optimizer is Where.HOST:
            return ResidentStore(self._arena.take(nbytes))
        return self.swap_files["optimizer"].store(plan.name, nbytes)

    def _shard_store(self, plan: UnitPlan, placement: Placement) -> Store:
        if placement.params is Where.DEVICE:
            return ResidentStore()
        nbytes = parameter_nbytes(plan, self._parts)
        if placement.params is Where.HOST:
            return ResidentStore(self._arena.take(nbytes))
        return self.swap_files["param"].store(plan.name, nbytes)

    def _record_nbytes(self, plan: UnitPlan, placement: Placement) -> int:
        return record(plan, self._rank, self._parts, self._formats, keeps_copy(placement, self._separate)).nbytes

    def _accumulator(self, plan: UnitPlan) -> HostGradAccumulator:
        dtype = _DTYPES[self._gradients]
        memory = self._arena.take(gradient_nbytes(plan, self._parts, self._gradients))
        numel = plan.layout.numel // self._parts
        return HostGradAccumulator(
            memory[: numel * dtype.itemsize].view(dtype), _DTYPES[self._accumulate], self._staging
        )

    def _count(self) -> HostBytes:
        return host_bytes(
            self._plans,
            self.placements,
            self._rank,
            self._parts,
            self._formats,
            self._gradients,
            self._separate,
            self._settings.optimizer_buffers,
            self._settings.params_buffers,
        )

    def _open(self, mesh: Mesh) -> None:
        """Take memory and open files; RuntimeError on all ranks where one cannot."""
        if self._settings.enabled:
            # All ranks of a host look at what is free before one of them takes any.
            self._all(self._check_room, mesh)
        self._all(self._take, mesh)
        rank_zero(logging.INFO, "host memory of each rank:\n%s", self.describe())

    def _all(self, what: Callable[[Mesh], None], mesh: Mesh) -> None:
        """Have every rank do `what`; RuntimeError on all ranks where one cannot."""
        problem: RuntimeError | None = None
        try:
            what(mesh)
        except RuntimeError as error:
            problem = error
        text = "no problem" if problem is None else str(problem)
        agree([text], mesh.data, self._device, "state cannot be kept off the device on all ranks")
        if problem is not None:
            raise problem

    def _check_room(self, mesh: Mesh) -> None:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", str(mesh.data.size)))
        check_room(self.describe(), self.host.memory, ranks_here)

    def _take(self, mesh: Mesh) -> None:
        if self.host.memory:
            self._arena = PinnedArena(self.host.memory, self._device, self._settings.pinned)
        self._open_files(mesh.global_rank)

    def _open_files(self, rank: int) -> None:
        settings, requests = self._settings, self._settings.requests
        both = list(zip(self._plans, self.placements, strict=True))
        records = [
            self._record_nbytes(plan, placement)
            for plan, placement in both
            if placement.optimizer is Where.FILE and is_updated(plan)
        ]
        shards = [parameter_nbytes(plan, self._parts) for plan, place in both if place.params is Where.FILE]
        for kind, folder, sizes, count, way in (
            ("optimizer", settings.optimizer_folder, records, settings.optimizer_buffers, requests),
            ("param", settings.params_folder, shards, settings.params_buffers, Requests()),
        ):
            if sizes:
                self._aio = self._aio or Aio(requests.threads, requests.queue_depth, requests.block_size)
                buffers = [self._arena.take(max(sizes)) for _ in range(count)]
                self.swap_files[kind] = SwapFile(folder, kind, rank, sum(sizes), buffers, self._aio, way)
                rank_zero(logging.INFO, "%s state rests in %s (%s)", kind, folder, self._aio.backend)


def has_own_memory(device: torch.device) -> bool:
    """Whether the device's memory is another than the host's, so that what both use must be copied."""
    return device.type != "cpu"


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
