"""`"ratio": "auto"`: as much optimizer state stays on the device as fits into its free memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zero.core import comm
from zero.core.mesh import Mesh
from zero.core.offload import OffloadSettings, has_own_memory
from zero.log import rank_zero
from zero.memory.available import available_nbytes
from zero.memory.host_bytes import MIB, record
from zero.plan.formats import ITEMSIZE, Formats
from zero.plan.memory import alive_nbytes
from zero.plan.placement import Where, is_updated
from zero.plan.sharding import Sharding
from zero.plan.units import UnitPlan

RESERVE = 0.4  # of the device's memory: activations, which nobody knows before the first step
_GATHERED = 2  # units whose parameters and gradients are full at the same time: one in use, one in transfer


class Training(NamedTuple):
    """What decides over sizes beside the plans; `gradients` is the dtype of reduced ones off the device."""

    sharding: Sharding
    formats: Formats
    gradients: str
    accumulate: str
    accumulation: int


class Choice(NamedTuple):
    """The ratio for `place`, and the elements and bytes of one rank that stay on the device."""

    ratio: float
    numel: int
    nbytes: int


def settle_ratio(
    settings: OffloadSettings, plans: Sequence[UnitPlan], mesh: Mesh, device: torch.device, training: Training
) -> OffloadSettings:
    """`settings` with a number for a ratio that is None; collective where free memory decides.

    A device with memory of its own updates there faster than the host does after the copies, and memory is faster
    than a drive, so whatever fits stays. Where host and device share one memory, nothing is gained by staying. All
    ranks choose by the one with the least memory, so they choose alike.
    """
    if settings.ratio is not None:
        return settings
    if settings.optimizer is Where.DEVICE:
        return settings._replace(ratio=1.0)
    if settings.optimizer is Where.HOST and not has_own_memory(device):
        text = "state takes the same memory on either side"
        choice = Choice(1.0, 0, 0)
    else:
        free, total = _memory(mesh, device)
        reserve = RESERVE * total
        own = free - reserve - _needed(settings, plans, mesh.shard.size, training)
        rooms = comm.gather_scalars(
            torch.tensor([own], dtype=torch.float64, device=device), mesh.data, "ratio of the offload"
        )
        room = max(0.0, rooms.min().item())
        text = (
            f"each rank's device has {room / MIB:,.1f} MiB for state, beside parameters, gradients and a reserve of "
            f"{reserve / MIB:,.1f} MiB ({RESERVE:.0%}) for activations"
        )
        choice = choose_ratio(plans, mesh.shard.size, training.formats, training.gradients, room)
    chosen = f"ratio {choice.ratio:.4g}, {choice.numel:,} parameters ({choice.nbytes / MIB:,.1f} MiB) stay"
    rank_zero(logging.INFO, "offload_optimizer.ratio 'auto': %s. Chosen: %s", text, chosen)
    return settings._replace(ratio=choice.ratio)


def choose_ratio(units: Sequence[UnitPlan], parts: int, formats: Formats, gradients: str, room: float) -> Choice:
    """The smallest ratio with which masters, moments and gradients of the units that stay take at most `room` bytes.

    Of rank 0 of `parts`, for all ranks; `gradients`: the dtype of reduced gradients.
    """
    trained = [unit for unit in units if is_updated(unit)]
    total = sum(unit.layout.numel for unit in trained)
    numel = nbytes = 0
    for unit in trained:
        shard = unit.layout.numel // parts
        more = record(unit, 0, parts, formats, False).nbytes + ITEMSIZE[gradients] * shard
        if nbytes + more > room:
            break
        numel, nbytes = numel + unit.layout.numel, nbytes + more
    if numel in (0, total):
        return Choice(0.0 if numel else 1.0, numel // parts, nbytes)
    # Half an element more, so that no rounding of the ratio leaves the last unit out.
    return Choice(max(0.0, 1.0 - (numel + 0.5) / total), numel // parts, nbytes)


def _memory(mesh: Mesh, device: torch.device) -> tuple[int, int]:
    """Free and total bytes for one rank on the device that computes."""
    if device.type != "cuda":
        free = available_nbytes(int(os.environ.get("LOCAL_WORLD_SIZE", str(mesh.data.size))))
        return free, free
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def _needed(settings: OffloadSettings, plans: Sequence[UnitPlan], parts: int, training: Training) -> int:
    """Bytes of parameters and local gradients on the device while a backward runs."""
    largest = sorted(plans, key=lambda plan: plan.layout.numel)[-_GATHERED:]
    gathered = [plan.name for plan in largest]
    accumulates = not training.sharding.grads and training.accumulation > 1
    alive = alive_nbytes(
        plans,
        training.sharding,
        parts,
        gathered=gathered,
        local_gradients=[plan.name for plan in plans if plan.requires_grad] if accumulates else gathered,
        accumulation=training.accumulation,
        accumulate=training.accumulate,
    )
    fetched = sum(ITEMSIZE[plan.dtype] * plan.layout.numel for plan in largest)
    return alive.gradients + (alive.parameters if settings.params is Where.DEVICE else fetched)
