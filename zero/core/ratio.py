"""`"ratio": "auto"`: as much optimizer state stays on the device as fits into its free memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from zero.config.zero_section import ZeroOptimization
from zero.core.agree import agree
from zero.core.world import World
from zero.log import rank_zero
from zero.memory.available import available_nbytes
from zero.memory.update_costs import RESERVE
from zero.plan.memory import MIB, SLOTS, Scheme, alive_nbytes
from zero.plan.placement import Placement, Where, is_updated
from zero.plan.units import Parts, UnitPlan, of_each

_GATHERED = 2  # units whose parameters and gradients are full at the same time: one in use, one in transfer


def choose_ratio(
    section: ZeroOptimization, plans: Sequence[UnitPlan], scheme: Scheme, world: World, device: torch.device
) -> float:
    """The ratio for `place`: what the JSON says, or where that is "auto" one by free memory; collective then.

    A device with memory of its own updates there faster than the host does after the copies, and memory is faster
    than a drive, so whatever fits stays. Where host and device share one memory, nothing is gained by staying. All
    ranks choose by the one with the least memory, so they choose alike.
    """
    place = section.offload_optimizer
    if place.ratio != "auto" or place.device == "none":
        return 1.0 if place.ratio == "auto" else place.ratio
    if place.device == "cpu" and not scheme.mirrored:
        text = "state takes the same memory on either side"
        ratio, numel, nbytes = 1.0, 0, 0
    else:
        own, reserve = room_for_state(section, plans, scheme, world, device)
        each = [held.device for held in scheme.held(plans)]
        sizes = [held.record + held.gradients for held in each]
        if place.zero.update != "host":  # gradients stay, too
            own -= SLOTS * max(held.parameters + held.record for held in each)
            own -= sum(held.gradients for held in each)
            sizes = [held.record for held in each]
        room = max(0.0, min(agree(own, world)))
        text = (
            f"each rank's device has {room / MIB:,.1f} MiB for state, beside parameters, gradients and a reserve of "
            f"{reserve / MIB:,.1f} MiB ({RESERVE:.0%}) for activations"
        )
        ratio, numel, nbytes = fitting(plans, sizes, scheme.parts, room)
    chosen = f"ratio {ratio:.4g}, {numel:,} parameters ({nbytes / MIB:,.1f} MiB) stay"
    rank_zero(logging.INFO, "offload_optimizer.ratio 'auto': %s. Chosen: %s", text, chosen)
    return ratio


def fitting(units: Sequence[UnitPlan], sizes: Sequence[int], parts: Parts, room: float) -> tuple[float, int, int]:
    """The smallest ratio with which the state of the units that stay takes at most `room` bytes.

    And the elements and bytes of one rank that stay then. `sizes`: bytes of each unit's state, of rank 0 of `parts`,
    for all ranks.
    """
    trained = [each for each in zip(units, of_each(parts, units), sizes, strict=True) if is_updated(each[0])]
    total = sum(unit.layout.numel for unit, *_ in trained)
    numel = own = nbytes = 0
    for unit, cut, more in trained:
        if nbytes + more > room:
            break
        numel, own, nbytes = numel + unit.layout.numel, own + unit.layout.numel // cut, nbytes + more
    if numel in (0, total):
        return 0.0 if numel else 1.0, own, nbytes
    # Half an element more, so that no rounding of the ratio leaves the last unit out.
    return max(0.0, 1.0 - (numel + 0.5) / total), own, nbytes


def room_for_state(
    section: ZeroOptimization, plans: Sequence[UnitPlan], scheme: Scheme, world: World, device: torch.device
) -> tuple[float, float]:
    """Bytes of this rank's device for optimizer state and reduced gradients, and those reserved for activations.

    The rest is for parameters and local gradients while a backward runs.
    """
    free, total = device_memory(world, device)
    largest = [plan.name for plan in sorted(plans, key=lambda plan: plan.layout.numel)[-_GATHERED:]]
    away = Placement(Where.HOST, Where(section.offload_param.device))
    local = [plan.name for plan in plans if plan.requires_grad] if scheme.collected else largest
    scheme = replace(scheme, placements=[away] * len(plans))
    held = alive_nbytes(plans, scheme, gathered=largest, local_gradients=local)
    return free - RESERVE * total - held.parameters - held.gradients, RESERVE * total


def device_memory(world: World, device: torch.device) -> tuple[int, int]:
    """Free and total bytes for one rank on the device that computes."""
    if device.type != "cuda":
        free = available_nbytes(int(os.environ.get("LOCAL_WORLD_SIZE", str(world.size))))
        return free, free
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
