"""What one rank writes of an engine: its part of every unit, each element once over all ranks, on every stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA

from zero.checkpoint.safe_file import NAMES, TensorChunk, dtype_name
from zero.checkpoint.staging import host_bytes
from zero.core.owner import owner_of
from zero.core.unit import Unit
from zero.kernels.crc32 import crc32
from zero.kernels.moments import BLOCK, Moment, blocks_of
from zero.optim.optimizer import ZeroOptimizer
from zero.plan.layout import Fragment

FILES = {"weight": "weights", "buffer": "weights", "master": "masters", "tensor": "state"}  # all others: moments


def unit_chunks(unit: Unit, optimizer: ZeroOptimizer | None, forms: bool = False) -> Iterator[TensorChunk]:
    """The chunks of a unit that this rank writes; views that are valid while the unit is borrowed.

    `forms`: without values, on the meta device, and without bringing any.
    """
    take = _form if forms else torch.Tensor.narrow
    shapes = dict(zip(unit.plan.layout.spans, (param.shape for param in unit.params), strict=True))
    # That of a cut along all ranks, whatever is cut.
    window = unit.plan.layout.shard(unit.mesh.span, unit.mesh.data.size)
    shift = window.start - unit.window.start  # of what is written in what is kept
    for fragment in unit.plan.layout.fragments(window):
        part, numel = fragment._replace(at=fragment.at + shift), fragment.numel
        weight = take(unit.shard, 0, part.at, numel)
        chunk = TensorChunk("weight", part.name, part.start, tuple(shapes[part.name]), weight)
        yield chunk
        if unit.master is None or optimizer is None:
            continue
        if unit.master.tensor is not unit.master.shard:
            yield chunk._replace(kind="master", values=take(unit.master.tensor, 0, part.at, numel))
        for name, moment in _moments(unit, optimizer, part, forms).items():
            yield chunk._replace(kind=name, values=take(moment.values, 0, 0, numel))
            if moment.scales is not None:
                scales, shape = take(moment.scales, 0, 0, blocks_of(numel)), (blocks_of(math.prod(chunk.shape)),)
                yield TensorChunk(f"scales.{name}", part.name, part.start // BLOCK, shape, scales)


def _moments(unit: Unit, optimizer: ZeroOptimizer, part: Fragment, forms: bool) -> dict[str, Moment]:
    """The states of a fragment; for their `forms` only, where they rest in files, those of a run that it is in."""
    rule, group = optimizer.shard_optimizer, optimizer.param_groups[unit.plan.group]
    if not forms or unit.placement.state_store.resident:
        return {name: moment for name, (moment, _) in rule.kept(unit, group, part).items()}
    # Only rules that know their state beforehand let it rest in files.
    states = rule.states(unit, group)
    there = (moments for run, moments in states.runs if run.start <= part.at < run.start + run.numel)
    return dict(zip(states.names, next(there, ()), strict=False))


def _form(tensor: torch.Tensor, dim: int, start: int, numel: int) -> torch.Tensor:
    """What `narrow` gives, without values, and also of a tensor that is away."""
    return torch.empty(numel, dtype=tensor.dtype, device="meta")


def signs(unit: Unit, optimizer: ZeroOptimizer | None) -> dict[str, bool]:
    """Whether each moment of a unit can be negative; while the unit is borrowed."""
    if unit.master is None or optimizer is None:
        return {}
    rule, group = optimizer.shard_optimizer, optimizer.param_groups[unit.plan.group]
    first = unit.plan.layout.fragments(unit.window)[:1]
    return {key: kept.signed for part in first for key, kept in rule.kept(unit, group, part).items()}


def numbers(unit: Unit, optimizer: ZeroOptimizer) -> dict[str, float]:
    """The single numbers of a unit's state; none before a state exists."""
    rule, group = optimizer.shard_optimizer, optimizer.param_groups[unit.plan.group]
    first = unit.plan.layout.fragments(unit.window)[:1]
    if not rule.foreseen and not any(rule.kept(unit, group, part) for part in first):
        return {}
    return {key: rule.number(unit, group, key) for key in rule.keys(unit, group)[1]}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Other names of parameters -> the one that units know."""
    names = module.named_parameters(remove_duplicate=False)
    owners = {name: owner_of(param) for name, param in names}
    return {name: owner.name for name, owner in owners.items() if owner is not None and owner.name != name}


def saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a state_dict, by name."""
    state = module.state_dict(keep_vars=True)
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    }


def extra_states(module: nn.Module) -> dict[str, Any]:
    """What modules give of themselves by `get_extra_state`, by its name in a state_dict."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if name.rpartition(".")[2] == EXTRA}


def digest(value: torch.Tensor) -> list[Any]:
    """What is equal for equal tensors, and hardly ever else; JSON."""
    flat = value.detach().cpu().contiguous()
    return [dtype_name(value.dtype), list(value.shape), crc32(host_bytes(flat))]


def whole_chunks(kind: str, tensors: Mapping[str, torch.Tensor]) -> list[TensorChunk]:
    """Whole tensors: buffers, or those of client state, of random numbers and the like."""
    for name, value in tensors.items():
        if value.dtype not in NAMES or value.layout != torch.strided:
            raise ValueError(
                f"{kind} '{name}' is {value.layout} {value.dtype}; a checkpoint holds {', '.join(NAMES.values())}"
            )
    return [
        TensorChunk(kind, name, 0, tuple(value.shape), value.detach().contiguous().view(-1))
        for name, value in tensors.items()
    ]


def by_file(chunks: Iterable[TensorChunk]) -> dict[str, list[TensorChunk]]:
    """The chunks of each kind of file."""
    files: dict[str, list[TensorChunk]] = {}
    for chunk in chunks:
        files.setdefault(FILES.get(chunk.kind, "moments"), []).append(chunk)
    return files
