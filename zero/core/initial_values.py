"""The first values of a unit's flat buffers: rank 0's parameters, brought to all ranks and rounded chunk by chunk.

A 16-bit unit so takes the buffers that stay, and one chunk, beside the parameters as they were built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zero.core import comm
from zero.core.comm import Axis
from zero.core.mesh import Mesh
from zero.core.owner import is_released, owner_of
from zero.core.quantized_params import quant_tensors
from zero.kernels.remainder import write_remainder, write_rounded
from zero.plan.layout import Span
from zero.plan.units import UnitPlan

# Elements that travel at a time: few enough to be small beside a model, enough to keep a GPU and a network busy.
_CHUNK = {"cpu": 1 << 20}
_CHUNK_ELSEWHERE = 1 << 24


@torch.no_grad()
def initial_values(
    params: Sequence[nn.Parameter],
    plan: UnitPlan,
    mesh: Mesh,
    own: Span,
    dtype: torch.dtype,
    device: torch.device,
    remainder: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rank 0's values of `params` in a flat buffer [plan.layout.numel] of `dtype`, with zeros between them; collective.

    And the `tensor` [own.numel] of the `Master` of the shard `own`: fp32 values, or with `remainder` (bf16 only) int16
    remainders, made from the values before they are rounded; None where the unit is frozen or has no 16-bit dtype.
    A parameter built under `zero.Init` is fetched from its ranks, one at a time, is not sent again, and has no values
    of its own afterwards.
    """
    if not plan.requires_grad or dtype.itemsize >= 4:
        full = torch.zeros(plan.layout.numel, dtype=dtype, device=device)
        # Straight into the buffer, which is what the parameters are trained or kept in.
        places = [full.narrow(0, *span) for span in plan.layout.spans.values()]
        unequal = [place for param, place in zip(params, places, strict=True) if not _copy_to(param, place, mesh)]
        for place in [full] if len(unequal) == len(places) else unequal:
            comm.broadcast(place, 0, mesh.data, plan.name)
        return full, None
    full = torch.empty(plan.layout.numel, dtype=dtype, device=device)
    master = torch.empty(own.numel, dtype=torch.int16 if remainder else torch.float32, device=device)
    for start, exact in _exact_chunks(params, plan, mesh, device):
        span = Span(start, exact.numel())
        _write(exact, full.narrow(0, *span))
        common = span.intersect(own)
        if common.numel:
            at = common.start - own.start
            _write(exact.narrow(0, common.start - start, common.numel), master.narrow(0, at, common.numel))
    return full, master


@torch.no_grad()
def share_quant_state(params: Sequence[nn.Parameter], axis: Axis, label: str) -> None:
    """Take from rank 0 what is beside the values of those that are quantised, in one message; collective."""
    tensors = [each for param in params for each in quant_tensors(param)]
    if not tensors or axis.size == 1:
        return
    sent = torch.cat([each.reshape(-1).view(torch.uint8) for each in tensors])
    comm.broadcast(sent, 0, axis, label)
    for each, taken in zip(tensors, sent.split([each.nbytes for each in tensors]), strict=True):
        each.copy_(taken.clone().view(each.dtype).view(each.shape))


@torch.no_grad()
def share_equal(params: Sequence[nn.Parameter], plan: UnitPlan, axis: Axis) -> None:
    """Take from the first rank the values of those that are the same on all ranks of the axis; collective."""
    for spec, param in zip(plan.params, params, strict=True) if axis.size > 1 else ():
        if spec.cut is None and not is_released(param):  # one that was built under zero.Init has rank 0's values
            comm.broadcast(param.data, 0, axis, plan.name)


def _write(exact: torch.Tensor, out: torch.Tensor) -> None:
    """fp32 values into a flat buffer: as the dtype of `out` keeps them, int16 standing for remainders."""
    if out.dtype == torch.bfloat16:
        write_rounded(exact, out)
    elif out.dtype == torch.int16:
        write_remainder(exact, out)
    else:
        out.copy_(exact)


def _exact_chunks(
    params: Sequence[nn.Parameter], plan: UnitPlan, mesh: Mesh, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """The flat buffer in fp32, chunk by chunk: where each begins, and rank 0's values. The next overwrites them."""
    layout = plan.layout
    if any(owner_of(param) is not None for param in params):
        spans = list(layout.spans.values())
        stops = [*(span.start for span in spans[1:]), layout.numel]  # the padding behind a parameter goes with it
        for param, span, stop in zip(params, spans, stops, strict=True):
            exact = torch.zeros(stop - span.start, dtype=torch.float32, device=device)
            place = exact.narrow(0, 0, span.numel)
            if not _copy_to(param, place, mesh):
                comm.broadcast(place, 0, mesh.data, plan.name)
            yield span.start, exact
        return
    chunk = min(layout.numel, _CHUNK.get(device.type, _CHUNK_ELSEWHERE))
    memory = torch.empty(chunk, dtype=torch.float32, device=device)
    by_name = dict(zip(layout.spans, params, strict=True))
    for start in range(0, layout.numel, chunk):
        exact = memory[: min(chunk, layout.numel - start)]
        if mesh.data.rank == 0:
            parts = layout.fragments(Span(start, exact.numel()))
            if sum(part.numel for part in parts) < exact.numel():
                exact.zero_()
            for part in parts:
                values = by_name[part.name].detach().reshape(-1)
                exact.narrow(0, part.at, part.numel).copy_(values.narrow(0, part.start, part.numel))
        comm.broadcast(exact, 0, mesh.data, plan.name)
        yield start, exact


def _copy_to(param: nn.Parameter, place: torch.Tensor, mesh: Mesh) -> bool:
    """Copy a parameter's values to its place [numel]; True if all ranks have the same ones, else only rank 0 does."""
    owner = owner_of(param)
    if owner is not None:  # of a model under construction
        return owner.unit.move_to(place.view(param.shape))
    if mesh.data.rank == 0:
        place.view(param.shape).copy_(param.detach())
    return False
