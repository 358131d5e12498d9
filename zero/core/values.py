"""One parameter over its ranks: its exact values and its gradient, read and written between steps.

Every rank owns at most one *piece* of a parameter: what of it lies in the rank's shard. What is said here of a
value [numel] holds on every stage; where shards are whole, the piece is the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zero.core import comm
from zero.core.agree import agree
from zero.core.master import rounded
from zero.core.owner import Owner
from zero.core.param_buffer import State
from zero.core.prefetcher import in_backward
from zero.plan.cut import Box, places
from zero.plan.layout import Fragment


def piece(owner: Owner, rank: int | None = None) -> Fragment:
    """What `rank` of the shard axis (default: this one) owns of the parameter; numel 0 where that is nothing."""
    layout, axis = owner.unit.plan.layout, owner.unit.mesh.shard
    return layout.fragment(owner.name, layout.shard(axis.rank if rank is None else rank, axis.size))


def agree_on(owner: Owner, what: str, problem: Exception | None = None, flags: Sequence[bool] = ()) -> list[bool]:
    """Make sure that all ranks do `what` with this parameter and that none has a problem; collective.

    Returns for each flag whether any rank has it. Raises on all ranks alike, before anything is touched: `problem`
    where there is one, RuntimeError where another rank has one or does something else.
    """
    found: list[Any] = [*flags]
    wrong = None if problem is None else f"rank {owner.unit.mesh.data.global_rank}: {problem}; nothing was changed"
    for axis in (owner.unit.mesh.data, owner.unit.mesh.peers):
        said = agree([what, owner.name, wrong, *found], axis)
        for rank, (other, name, text, *_) in zip(axis.ranks, said, strict=True):
            wrong = wrong or text
            if wrong is None and (other, name) != (what, owner.name):
                wrong = (
                    f"rank {axis.global_rank} does {what} with parameter '{owner.name}' and rank {rank} {other} with "
                    f"'{name}'; it is a collective, which all ranks must call with the same parameters in one order"
                )
        found = [any(each) for each in zip(*(more for _, _, _, *more in said), strict=False)]
    if wrong is not None:
        raise problem or RuntimeError(wrong)
    return found


def check_idle(owner: Owner, what: str) -> Exception | None:
    """Why values cannot be looked at now, or None."""
    if in_backward():
        return RuntimeError(f"{what} of parameter '{owner.name}' inside a backward; call it after the backward")
    return owner.unit.absence()


def assemble(owner: Owner, own: torch.Tensor) -> torch.Tensor:
    """The whole [numel] out of every rank's piece `own`; collective, moves nothing but the parameter's own bytes."""
    axis, numel = owner.unit.mesh.shard, owner.unit.plan.layout.spans[owner.name].numel
    own = own.to(owner.unit.buffer.full.device)
    full = torch.empty(numel, dtype=own.dtype, device=own.device)
    for rank in range(axis.size):
        part = piece(owner, rank)
        if part.numel:
            target = full.narrow(0, part.start, part.numel)
            if rank == axis.rank:
                target.copy_(own)
            comm.broadcast(target, rank, axis)
    return full


def with_parts(owner: Owner, own: torch.Tensor) -> torch.Tensor:
    """The full parameter [full numel] of which ranks have parts, from this one's [numel]; collective."""
    cut, axis = owner.unit.plan.params[owner.index].cut, owner.unit.mesh.peers
    if cut is None:
        return own
    full = torch.empty(cut.shape, dtype=own.dtype, device=own.device)
    for rank, said in enumerate(agree(cut.boxes, axis)):
        boxes = [Box(tuple(offset), tuple(sizes)) for offset, sizes in said]
        numel = sum(box.numel for box in boxes)
        part = own if rank == axis.rank else own.new_empty(numel)
        comm.broadcast(part, rank, axis)
        for box, at in places(boxes, 0, numel):
            full[box.slices].copy_(part[at : at + box.numel].view(box.sizes))
    return full.view(-1)


def own_part(owner: Owner, full: torch.Tensor) -> torch.Tensor:
    """The part of a full parameter that is this rank's parameter, [numel]."""
    cut = owner.unit.plan.params[owner.index].cut
    if cut is None:
        return full.reshape(-1)
    full = full.reshape(cut.shape)
    return torch.cat([full[box.slices].reshape(-1) for box in cut.boxes])


def is_part(owner: Owner) -> bool:
    """Whether the parameter is a part of a larger one."""
    return owner.unit.plan.params[owner.index].cut is not None


def full_shape(owner: Owner) -> tuple[int, ...]:
    """The shape of the parameter, or of the larger one that it is a part of."""
    cut = owner.unit.plan.params[owner.index].cut
    return tuple(owner.param.shape) if cut is None else cut.shape


def same_everywhere(owner: Owner, values: torch.Tensor) -> torch.Tensor:
    """The `values` of rank 0, on its own storage and on the parameter's device; collective."""
    values = values.detach().to(owner.unit.buffer.full.device, copy=True).contiguous()
    for axis in (owner.unit.mesh.peers, owner.unit.mesh.data):
        comm.broadcast(values, 0, axis)
    return values


def cut_out(owner: Owner, values: torch.Tensor) -> torch.Tensor:
    """This rank's piece of the parameter's values, as a flat view."""
    part = piece(owner)
    return values.reshape(-1).narrow(0, part.start, part.numel)


def exact_piece(owner: Owner) -> torch.Tensor:
    """This rank's piece of the exact values, fp32 [n], a copy; with what the user has written."""
    owner.unit.take_writes()
    part = piece(owner)
    with owner.unit.shard.acquired():
        return owner.unit.shard.master.values(part.at, part.numel).clone()


def write_exact(owner: Owner, own: torch.Tensor, whole: torch.Tensor | None = None) -> None:
    """Replace this rank's piece of the exact values by `own`, fp32 [n], and show the rounding to readers.

    `whole` [numel]: all pieces, where they are known; without it this is a collective wherever a full copy is there.
    """
    unit, part = owner.unit, piece(owner)
    unit.take_writes()
    if part.numel:
        unit.write_exact(part.at, own)
    if whole is None:
        seen = not unit.resharded or unit.state is not State.SHARDED
        with unit.shard.acquired():
            rounding = unit.shard.values.narrow(0, part.at, part.numel).clone()
        unit.renew(owner.index, assemble(owner, rounding) if seen else rounding)
    else:
        unit.renew(owner.index, rounded(whole, unit.shard.values.dtype))


def gradient(owner: Owner, what: str) -> torch.Tensor | None:
    """The sum of the parameter's gradients over ranks and micro-batches so far, fp32 [numel]; None without any.

    Collective. What is not reduced yet is added up in the order of ranks and stays unreduced.
    """
    unit, grads = owner.unit, owner.unit.gradients
    flags = (grads.flat is not None, grads.shard is not None)
    local, reduced = agree_on(owner, what, check_idle(owner, what), flags)
    total = None
    if reduced:
        part = piece(owner)
        total = assemble(owner, grads.shard.narrow(0, part.at, part.numel).float())
    if local:
        found = grads.local(owner.index)
        for axis in (unit.mesh.shard, unit.mesh.summed.replica) if found.numel() else ():
            rows = comm.gather_scalars(found, axis, "gradient")
            found = rows[0].clone()
            for row in rows[1:]:
                found += row
        total = found if total is None else total.add_(found)
    return total


def reduced_piece(owner: Owner, what: str, problem: Exception | None) -> torch.Tensor:
    """This rank's piece of the gradient's sum, fp32 [n], the storage itself, to be written; collective.

    What is local is reduced first. Raises on all ranks where `problem` is given or there is no gradient.
    """
    grads = owner.unit.gradients
    flags = (grads.flat is not None, grads.shard is not None)
    local, reduced = agree_on(owner, what, problem or check_idle(owner, what), flags)
    if not (local or reduced):
        raise RuntimeError(
            f"{what}: parameter '{owner.name}' has no gradient (rank {owner.unit.mesh.data.global_rank}); "
            "set it between backward() and step()"
        )
    if local:
        owner.unit.shard.settle()  # an update that still runs reads where the sum will be
        grads.settle()
    part = piece(owner)
    return grads.shard.narrow(0, part.at, part.numel)


def write_frozen(owner: Owner, whole: torch.Tensor) -> None:
    """Replace the values of a parameter that has no master by `whole`, any shape, the same on all ranks."""
    unit, part = owner.unit, piece(owner)
    values = whole.reshape(-1).to(unit.buffer.full.device, unit.shard.values.dtype)
    if part.numel:
        with unit.shard.acquired(changed=True):
            unit.shard.values.narrow(0, part.at, part.numel).copy_(cut_out(owner, values))
    unit.renew(owner.index, values)
