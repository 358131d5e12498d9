"""Which device updates state that rests off the device: what the JSON says, or what the bytes say that must move."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from zero.config.zero_section import OffloadOptimizer, ZeroOptimization
from zero.core import comm, offload
from zero.core.mesh import Mesh
from zero.core.mixed_precision import MixedPrecisionPolicy
from zero.core.ratio import RESERVE, device_memory
from zero.kernels.formulas import Adam
from zero.kernels.moments import Moment
from zero.kernels.step import step
from zero.log import rank_zero
from zero.memory.available import host_threads
from zero.memory.host_bytes import MIB, SLOTS, record_nbytes, shard_nbytes
from zero.plan.placement import Where, keeps_copy, place
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
            f"{key} with Muon, or an optimizer class of torch or of the script, whose step is not our kernels' alone; "
            "name Adam, AdamW, Lion, SGD or Adagrad in the section 'optimizer' (without torch_adam, maximize and the "
            "like), give a zero.FusedOptimizer, or use 'host'"
        )


def is_streamed(
    section: ZeroOptimization,
    plans: Sequence[UnitPlan],
    ratio: float,
    mesh: Mesh,
    device: torch.device,
    numerics: MixedPrecisionPolicy,
    fused: bool,
) -> bool:
    """Whether state comes to the device to be updated: what the JSON says; where that is "auto", collective.

    The record of each unit crosses the link in both directions at once. The host reads gradient and record and writes
    the record, while gradients and parameters cross the link. All ranks choose by the one that would be slowest.
    """
    state, params, parts = section.offload_optimizer, section.offload_param, mesh.shard.size
    able = fused and state.device != "none" and offload.has_own_memory(device)
    if state.zero.update != "auto" or not able:
        return state.zero.update == "gpu"

    def records(streamed: bool) -> list[int]:
        where = Where(state.device), Where(params.device)
        places = place(plans, parts, *where, ratio, params.max_in_cpu, streamed)
        pairs = [pair for pair in zip(plans, places, strict=True) if pair[1].optimizer is not Where.DEVICE]
        return [sum(record_nbytes(plan, 0, parts, numerics.formats, keeps_copy(at, True))) for plan, at in pairs]

    link, host = rates(device)
    through, there = records(True), records(False)
    gradients = sum(shard_nbytes(plan, parts, numerics.resting_dtype(mesh)) for plan in plans)
    by_gpu, by_host = sum(through) / link, max((gradients + 2 * sum(there)) / host, gradients / link)
    free, total = device_memory(mesh, device)
    fits = SLOTS * max(through, default=0) <= free - RESERVE * total
    mine = torch.tensor([by_gpu, by_host, not fits], dtype=torch.float64, device=device)
    by_gpu, by_host, lacks = comm.gather_scalars(mine, mesh.data, "update of the offload").amax(0).tolist()
    chosen = by_gpu < by_host and not lacks
    rank_zero(
        logging.INFO,
        "offload_optimizer.zero.update 'auto': %.1f ms of a step on the GPU (%.1f MiB at %.1f GB/s), %.1f ms "
        "on the host (%.1f GB/s)%s. Chosen: %s",
        *(1e3 * by_gpu, sum(through) / MIB, link / 1e9, 1e3 * by_host, host / 1e9),
        *(", too little memory on the GPU" if lacks else "", "gpu" if chosen else "host"),
    )
    return chosen


def rates(device: torch.device) -> tuple[float, float]:
    """Bytes/s from host memory to the device, and of an update by the host, while all ranks do the same."""
    pinned = torch.zeros(_NBYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(pinned, device=device)
    n, cpu = _NBYTES // 4, torch.device("cpu")
    master, grad, *moments = (torch.zeros(n) for _ in range(4))
    formula, kept = Adam(lr=1e-3), tuple(map(Moment, moments))

    def update() -> None:
        step(formula, master, kept, grad, None, step=1, grad_scale=1.0, threads=host_threads())

    read_and_written = 7 * _NBYTES
    return _NBYTES / _seconds(lambda: there.copy_(pinned), device), read_and_written / _seconds(update, cpu)


def _seconds(turn: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_TRIALS):
        begin = time.perf_counter()
        turn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)
