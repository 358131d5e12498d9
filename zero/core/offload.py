"""Gives each unit its placement: takes host memory, opens files, and says beforehand how much of both."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from zero.config.sections import Aio as AioSection
from zero.config.zero_section import OffloadOptimizer, OffloadParam, ZeroOptimization
from zero.core.agree import agree
from zero.core.comm import Axis
from zero.core.mixed_precision import DTYPES, MixedPrecisionPolicy
from zero.core.world import World
from zero.kernels.aio import Aio
from zero.log import rank_zero
from zero.memory.file_store import SwapFile, close_all
from zero.memory.host_gradients import HostGradAccumulator, StagingBuffers
from zero.memory.pinned_arena import PinnedArena, check_room
from zero.memory.state_placement import StatePlacement
from zero.memory.store import Store
from zero.memory.streamed_store import Slots, StreamedStore
from zero.memory.streams import Streams
from zero.plan.memory import SLOTS, Scheme, host_bytes, host_table
from zero.plan.placement import Where, is_updated, keeps_copy, place
from zero.plan.sharding import Sharding
from zero.plan.units import UnitPlan


class Offload:
    """The placements of all units of one engine, and the memory behind them.

    scheme: with the placement of each unit; host: bytes of this rank in host memory and in files.
    """

    def __init__(
        self,
        section: ZeroOptimization,
        aio: AioSection,
        plans: Sequence[UnitPlan],
        scheme: Scheme,
        ranks: Sequence[int],
        world: World,
        device: torch.device,
        streams: Streams,
    ) -> None:
        """Take all memory that will be needed; RuntimeError with a table, on all ranks, where one has too little.

        `ranks`: the place of this one on the axis along which each unit is cut.
        """
        state, params = section.offload_optimizer, section.offload_param
        self._state, self._params, self._drive = state, params, aio
        self._plans, self.scheme, self.placements = plans, scheme, scheme.placements
        self._device, self._events = device, world.watchdog.events
        self._held = scheme.held(plans, ranks)
        self.host = host_bytes(self._held, state.buffer_count, params.buffer_count)
        self._arena: PinnedArena | None = None
        self._aio: Aio | None = None
        self.swap_files: dict[str, SwapFile] = {}
        self._streams, self._staging = streams, StagingBuffers(device, scheme.mirrored, streams.down)
        self._slots: Slots | None = None
        # All ranks of a host look at what is free before one of them takes any.
        for what in (self._check_room, self._take):
            problem: RuntimeError | None = None
            try:
                what(world)
            except RuntimeError as error:
                problem = error
            agree(problem, world, "state cannot be kept off the device on all ranks")
        rank_zero(logging.INFO, "host memory of each rank:\n%s", host_table(self.host))

    @property
    def slots_nbytes(self) -> int:
        """Bytes on the device through which state passes."""
        both = zip(self._held, self.placements, strict=True)
        return SLOTS * max((held.away.record for held, placement in both if placement.streamed), default=0)

    def placement(self, index: int) -> StatePlacement:
        """The placement of unit `index`; to be called once for each, in order."""
        plan, placement = self._plans[index], self.placements[index]
        updated_on_host = not placement.used_on_device
        shard_offloaded = placement.params is not Where.DEVICE
        cpu = torch.device("cpu")
        return StatePlacement(
            update_device=cpu if updated_on_host else self._device,
            shard_device=cpu if shard_offloaded else self._device,
            streams=self._streams,
            shard_offloaded=shard_offloaded,
            shard_copied=is_updated(plan) and keeps_copy(placement, self.scheme.mirrored),
            state_store=self._state_store(index),
            shard_store=self._shard_store(index),
            host_gradients=self._accumulator(index) if updated_on_host else None,
            streamed=placement.streamed,
            queued=placement.streamed and Where.FILE not in placement,
            events=self._events,
            unit=plan.name,
        )

    def close(self) -> None:
        """Give files and memory back as soon as they are not used any more."""
        close_all(list(self.swap_files.values()), self._aio)
        if self._arena is not None:
            self._arena.close()

    def _state_store(self, index: int) -> Store:
        plan, placement, held = self._plans[index], self.placements[index], self._held[index]
        if placement.optimizer is Where.DEVICE or not is_updated(plan):
            return Store()
        if placement.optimizer is Where.HOST:
            rests = Store(self._arena.take(held.host.record))
        else:
            rests = self.swap_files["optimizer"].store(plan.name, held.file.record)
        return StreamedStore(rests, plan.name, held.away.record, self._slots) if placement.streamed else rests

    def _shard_store(self, index: int) -> Store:
        where, held = self.placements[index].params, self._held[index]
        if where is Where.DEVICE:
            return Store()
        if where is Where.HOST:
            return Store(self._arena.take(held.host.parameters))
        return self.swap_files["param"].store(self._plans[index].name, held.file.parameters)

    def _accumulator(self, index: int) -> HostGradAccumulator:
        dtype, scheme = DTYPES[self.scheme.resting], self.scheme
        numel = self._plans[index].layout.numel // scheme.parts[index]
        memory = self._arena.take(self._held[index].host.gradients)[: numel * dtype.itemsize]
        return HostGradAccumulator(memory.view(dtype), DTYPES[scheme.accumulate], self._staging)

    def _check_room(self, world: World) -> None:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", str(world.size)))
        check_room(host_table(self.host), self.host.memory, ranks_here)

    def _take(self, world: World) -> None:
        """Take memory and open files."""
        state, params = self._state, self._params
        pinned = (state if state.device != "none" else params).pin_memory
        self._arena = PinnedArena(self.host.memory, self._device, pinned)
        units = list(zip(self._plans, self.placements, self._held, strict=True))
        records = [held.file.record for plan, at, held in units if at.optimizer is Where.FILE and is_updated(plan)]
        shards = [held.file.parameters for _, at, held in units if at.params is Where.FILE]
        if any(placement.streamed for placement in self.placements):
            self._slots = Slots(self.slots_nbytes // SLOTS, self._device, self._streams)
        self._open("optimizer", state, records, world.global_rank)
        self._open("param", params, shards, world.global_rank)

    def _open(self, kind: str, section: OffloadOptimizer | OffloadParam, sizes: Sequence[int], rank: int) -> None:
        """Open the file for state of these sizes, if there is any; its buffers hold the largest."""
        if not sizes:
            return
        drive, folder = self._drive, section.nvme_path
        self._aio = self._aio or Aio(drive.intra_op_parallelism, drive.queue_depth, drive.block_size)
        buffers = [self._arena.take(max(sizes)) for _ in range(section.buffer_count)]
        ahead = kind == "param" or section.pipeline_read
        behind = kind == "param" or section.pipeline_write
        self.swap_files[kind] = SwapFile(folder, kind, rank, sum(sizes), buffers, self._aio, ahead, behind)
        rank_zero(logging.INFO, "%s state rests in %s (%s)", kind, folder, self._aio.backend)


def is_enabled(section: ZeroOptimization) -> bool:
    """Whether anything leaves the device."""
    return (section.offload_optimizer.device, section.offload_param.device) != ("none", "none")


def unplaced(
    sharding: Sharding, shards: Sequence[Axis], world: World, device: torch.device, numerics: MixedPrecisionPolicy
) -> Scheme:
    """How an engine cuts and adds up its state, before it is chosen where that rests."""
    return Scheme(
        sharding,
        [shard.size for shard in shards],
        formats=numerics.formats,
        accumulation=numerics.accumulation,
        accumulate=numerics.accumulate,
        resting=numerics.resting_dtype(world, shards),
        mirrored=has_own_memory(device),
    )


def placed(
    section: ZeroOptimization, plans: Sequence[UnitPlan], scheme: Scheme, ratio: float, streamed: bool
) -> Scheme:
    """With the place where the state of each unit rests.

    `ratio`: the part of the trained elements whose state leaves the device; `streamed`: it comes back for updates.
    """
    where = Where(section.offload_optimizer.device), Where(section.offload_param.device)
    placements = place(plans, scheme.parts, *where, ratio, section.offload_param.max_in_cpu, streamed)
    return replace(scheme, placements=placements)


def has_own_memory(device: torch.device) -> bool:
    """Whether the device's memory is another than the host's, so that what both use must be copied."""
    return device.type != "cpu"
