"""`"ratio": "auto"`: how much optimizer state leaves the device is decided by what this machine can do."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zero.core import comm
from zero.core.mesh import Mesh
from zero.core.offload import OffloadSettings, has_own_memory
from zero.log import rank_zero
from zero.memory.available import available_nbytes
from zero.memory.measured import measure
from zero.memory.threads import host_threads
from zero.plan.formats import ITEMSIZE, Formats
from zero.plan.host import MIB
from zero.plan.memory import alive_nbytes
from zero.plan.placement import Where
from zero.plan.ratio import Choice, Rates, Sizes, choose_ratio
from zero.plan.sharding import Sharding
from zero.plan.units import UnitPlan

RESERVE = 0.4  # of the device's memory: activations, which nobody knows before the first step
DRIVE = 1e9  # bytes per second that a drive counts as: it is not measured, but whatever fits into memory is faster
_WHOLE = 2  # units whose parameters and gradients are whole at once: one is used, one comes or goes


class Training(NamedTuple):
    """What decides over sizes beside the plans; `gradients` is the dtype of reduced ones off the device."""

    sharding: Sharding
    formats: Formats
    dtype: torch.dtype
    gradients: str
    accumulate: str
    accumulation: int


def settle_ratio(
    settings: OffloadSettings, plans: Sequence[UnitPlan], mesh: Mesh, device: torch.device, training: Training
) -> OffloadSettings:
    """`settings` with a number for a ratio that is None; collective where there is something to decide.

    Every rank measures, and all reckon with the slowest and the one with the least memory, so all choose alike.
    """
    if settings.ratio is not None:
        return settings
    if settings.optimizer is Where.DEVICE:
        return settings._replace(ratio=1.0)
    apart = has_own_memory(device)
    room, reserve = _room(settings, plans, mesh, device, training)
    mine = (*measure(device, training.dtype, training.formats, host_threads()), room)
    values = torch.tensor(mine, dtype=torch.float64, device=device)
    told = comm.gather_scalars(values, mesh.data, "ratio of the offload").tolist()
    *rates, room = (min(column) for column in zip(*told, strict=True))
    sizes = Sizes(0, mesh.shard.size, training.formats, training.gradients)  # of one rank for all, to choose alike
    found = Rates(*rates)
    if settings.optimizer is Where.FILE:
        found = found._replace(read=DRIVE, write=DRIVE)
    choice = choose_ratio(plans, sizes, settings.optimizer, settings.params, found, max(0.0, room), apart)
    rank_zero(logging.INFO, "%s", _said(found, room, reserve, choice))
    return settings._replace(ratio=choice.ratio)


def _room(
    settings: OffloadSettings, plans: Sequence[UnitPlan], mesh: Mesh, device: torch.device, training: Training
) -> tuple[float, float]:
    """Bytes of the device that state may take, and those that are kept free; infinite where it is the host's memory.

    There state takes the same memory on either side, unless the other side is a file.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    elif settings.optimizer is Where.FILE:
        total = free = available_nbytes(int(os.environ.get("LOCAL_WORLD_SIZE", str(mesh.data.size))))
    else:
        return math.inf, 0.0
    reserve = RESERVE * total
    return free - reserve - _needed(settings, plans, mesh.shard.size, training), reserve


def _needed(settings: OffloadSettings, plans: Sequence[UnitPlan], parts: int, training: Training) -> int:
    """Bytes of parameters and local gradients on the device while a backward runs."""
    largest = sorted(plans, key=lambda plan: plan.layout.numel)[-_WHOLE:]
    at_once = [plan.name for plan in largest]
    adds_up = not training.sharding.grads and training.accumulation > 1
    held = alive_nbytes(
        plans,
        training.sharding,
        parts,
        gathered=at_once,
        local_gradients=[plan.name for plan in plans if plan.requires_grad] if adds_up else at_once,
        accumulation=training.accumulation,
        accumulate=training.accumulate,
    )
    fetched = sum(ITEMSIZE[plan.dtype] * plan.layout.numel for plan in largest)
    return held.gradients + (held.parameters if settings.params is Where.DEVICE else fetched)


def _said(rates: Rates, room: float, reserve: float, choice: Choice) -> str:
    copies = f"copies take {rates.down / 1e9:.1f} GB/s down and {rates.up / 1e9:.1f} GB/s up"
    memory = (
        f"the device has {max(0.0, room) / MIB:,.1f} MiB for state, beside parameters, gradients and a reserve of "
        f"{reserve / MIB:,.1f} MiB ({RESERVE:.0%}) for activations"
    )
    return (
        f"offload_optimizer.ratio 'auto': on each rank the host updates {rates.host_update / 1e6:,.0f} million "
        f"parameters a second, the device {rates.device_update / 1e6:,.0f} million; "
        f"{'nothing has to be copied' if math.isinf(rates.up) else copies}; "
        f"{'' if math.isinf(rates.read) else f'a drive counts as {rates.read / 1e9:.1f} GB/s; '}"
        f"{'state takes the same memory on either side' if math.isinf(room) else memory}. "
        f"Chosen: ratio {choice.ratio:.4g}, {choice.numel:,} parameters ({choice.nbytes / MIB:,.1f} MiB) stay"
    )
