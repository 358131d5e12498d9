"""Which device updates state that rests off the device: what the JSON says, or what the bytes say that must move."""

from __future__ import annotations

import logging
import timeit
from collections.abc import Callable, Sequence

import torch

from zero.config.zero_section import OffloadOptimizer, ZeroOptimization
from zero.core import offload
from zero.core.agree import agree
from zero.core.ratio import room_for_state
from zero.core.world import World
from zero.kernels.formulas import Adam
from zero.kernels.moments import Moment
from zero.kernels.step import step
from zero.log import rank_zero
from zero.memory.available import host_threads
from zero.memory.update_costs import UpdateCosts, UpdateRates, update_costs
from zero.plan.memory import MIB, Scheme
from zero.plan.units import UnitPlan

_NBYTES = 1 << 26  # of a trial copy; and of each array of a trial step
_TRIALS = 3


def refuse_streaming(section: OffloadOptimizer, device: torch.device, fused: bool) -> None:
    """Raise ValueError where the JSON wants a GPU to update state and none can; `fused`: our kernels are the update."""
    if section.zero.update != "gpu":
        return
    key = "zero_optimization.offload_optimizer.zero.update: got 'gpu'"
    if not offload.has_own_memory(device):
        raise ValueError(
            f"{key}, and this rank computes on '{device}', where host and device share one memory; leave it out, or "
            "use 'auto', which is 'host' there"
        )
    if not fused:
        raise ValueError(
            f"{key} with LAMB, or an optimizer class of torch or of the script, whose step is not our kernels' alone; "
            "name Adam, AdamW, Lion, SGD or Adagrad in the section 'optimizer' (without torch_adam, maximize and the "
            "like), give a zero.FusedOptimizer, or use 'host'"
        )


def is_streamed(
    section: ZeroOptimization,
    plans: Sequence[UnitPlan],
    scheme: Scheme,
    ratio: float,
    world: World,
    device: torch.device,
    fused: bool,
) -> bool:
    """Whether state comes to the device to be updated: what the JSON says; where that is "auto", collective.

    Then rates are measured, and all ranks choose by the one that would be slowest, or has the least room.
    """
    state = section.offload_optimizer
    if state.zero.update != "auto" or state.device == "none":
        return state.zero.update == "gpu"
    line = "offload_optimizer.zero.update 'auto': "
    if not (fused and scheme.mirrored):
        why = "the optimizer is not our kernels' alone" if not fused else f"'{device}' shares the host's memory"
        rank_zero(logging.INFO, "%shost, as %s", line, why)
        return False
    found = rates(device)
    costs = update_costs(plans, offload.placed(section, plans, scheme, ratio, False), found)
    lacks = costs.nbytes - room_for_state(section, plans, scheme, world, device)[0]
    on_device, on_host, lacks = map(max, zip(*agree([costs.on_device, costs.on_host, lacks], world), strict=True))
    chosen = UpdateCosts(on_device, on_host, costs.through, lacks).streams(0)
    rank_zero(
        logging.INFO,
        "%s%s, as a step takes %.1f ms on the GPU (%.1f MiB each way at %.1f GB/s), %.1f ms on the host (%.1f GB/s)%s",
        *(line, "gpu" if chosen else "host", 1e3 * on_device, costs.through / MIB, found.link / 1e9),
        *(1e3 * on_host, found.host / 1e9, f"; the GPU lacks {lacks / MIB:,.1f} MiB for it" if lacks > 0 else ""),
    )
    return chosen


def rates(device: torch.device) -> UpdateRates:
    """The bandwidth of this rank while all ranks copy."""
    pinned = torch.zeros(_NBYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(pinned, device=device)
    beside, cpu = torch.empty_like(there), torch.device("cpu")
    master, grad, *moments = (torch.zeros(_NBYTES // 4) for _ in range(4))
    formula, kept = Adam(lr=1e-3), tuple(map(Moment, moments))

    def update() -> None:
        step(formula, master, kept, grad, None, step=1, grad_scale=1.0, threads=host_threads())

    link, copy = (_NBYTES / _seconds(lambda of=of: there.copy_(of), device) for of in (pinned, beside))
    read_and_written = 7 * _NBYTES
    return UpdateRates(link, read_and_written / _seconds(update, cpu), 2 * copy)


def _seconds(turn: Callable[[], object], device: torch.device) -> float:
    def complete() -> None:
        turn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return min(timeit.repeat(complete, number=1, repeat=_TRIALS))
