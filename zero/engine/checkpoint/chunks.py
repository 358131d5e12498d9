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
from zero.optim.optimizer import ZeroOptimizer
from zero.plan.formats import BLOCK
from zero.plan.layout import Fragment, Span

FILES = {"weight": "weights", "buffer": "weights", "master": "masters", "tensor": "state"}  # all others: moments


def window_of(unit: Unit) -> Span:
    """The part of the flat buffer that this rank writes: that of a cut along all ranks, whatever is cut."""
    return unit.plan.layout.shard(unit.mesh.span, unit.mesh.data.size)


def unit_chunks(unit: Unit, optimizer: ZeroOptimizer | None) -> Iterator[TensorChunk]:
    """The chunks of a unit that this rank writes; views that are valid while the unit is borrowed."""
    shapes = dict(zip(unit.plan.layout.spans, (param.shape for param in unit.params), strict=True))
    window = window_of(unit)
    shift = window.start - unit.window.start  # of what is written in what is kept
    for fragment in unit.plan.layout.fragments(window):
        part = fragment._replace(at=fragment.at + shift)
        shape = tuple(shapes[part.name])
        yield TensorChunk("weight", part.name, part.start, shape, unit.shard.narrow(0, part.at, part.numel))
        if unit.master is None or optimizer is None:
            continue
        if unit.master.tensor is not unit.master.shard:
            values = unit.master.tensor.narrow(0, part.at, part.numel)
            yield TensorChunk("master", part.name, part.start, shape, values)
        yield from _moments(unit, optimizer, part, shape)


def unit_forms(unit: Unit, optimizer: ZeroOptimizer | None) -> list[TensorChunk]:
    """What `unit_chunks` will give, without values and without bringing any: on the meta device."""
    if unit.placement.resident:
        return [form_of(chunk) for chunk in unit_chunks(unit, optimizer)]
    shapes = dict(zip(unit.plan.layout.spans, (param.shape for param in unit.params), strict=True))
    shift = window_of(unit).start - unit.window.start
    forms = []
    for part in unit.plan.layout.fragments(window_of(unit)):
        base = TensorChunk("weight", part.name, part.start, tuple(shapes[part.name]), unit.shard)
        forms.append(_form(base, unit.shard.dtype, part.numel))
        if unit.master is None or optimizer is None:
            continue
        if unit.master.tensor is not unit.master.shard:
            forms.append(_form(base._replace(kind="master"), unit.master.tensor.dtype, part.numel))
        if unit.placement.state_store.resident:
            here = part._replace(at=part.at + shift)
            forms += [form_of(chunk) for chunk in _moments(unit, optimizer, here, base.shape)]
            continue
        # Only rules that know their state beforehand let it rest in files.
        states = optimizer.shard_optimizer.states(unit, optimizer.param_groups[unit.plan.group])
        runs = (each for run, each in states.runs if run.start <= part.at + shift < run.start + run.numel)
        for name, moment in zip(states.names, next(runs, ()), strict=False):
            forms.append(_form(base._replace(kind=name), moment.values.dtype, part.numel))
            if moment.scales is not None:
                scales = base._replace(kind=f"scales.{name}", start=part.start // BLOCK, shape=_blocks(base.shape))
                forms.append(_form(scales, moment.scales.dtype, -(-part.numel // BLOCK)))
    return forms


def signs(unit: Unit, optimizer: ZeroOptimizer | None) -> dict[str, bool]:
    """Whether each moment of a unit can be negative; while the unit is borrowed."""
    if unit.master is None or optimizer is None:
        return {}
    group = optimizer.param_groups[unit.plan.group]
    first = unit.plan.layout.fragments(unit.window)[:1]
    return {
        key: kept.signed for part in first for key, kept in optimizer.shard_optimizer.kept(unit, group, part).items()
    }


def form_of(chunk: TensorChunk) -> TensorChunk:
    """A chunk without its values."""
    return _form(chunk, chunk.values.dtype, chunk.values.numel())


def _form(chunk: TensorChunk, dtype: torch.dtype, numel: int) -> TensorChunk:
    return chunk._replace(values=torch.empty(numel, dtype=dtype, device="meta"))


def _blocks(shape: tuple[int, ...]) -> tuple[int]:
    return (-(-math.prod(shape) // BLOCK),)


def _moments(unit: Unit, optimizer: ZeroOptimizer, part: Fragment, shape: tuple[int, ...]) -> Iterator[TensorChunk]:
    group = optimizer.param_groups[unit.plan.group]
    for name, (moment, _) in optimizer.shard_optimizer.kept(unit, group, part).items():
        yield TensorChunk(name, part.name, part.start, shape, moment.values[: part.numel])
        if moment.scales is not None:
            blocks = -(-part.numel // BLOCK)
            yield TensorChunk(f"scales.{name}", part.name, part.start // BLOCK, _blocks(shape), moment.scales[:blocks])


def numbers(unit: Unit, optimizer: ZeroOptimizer) -> dict[str, float]:
    """The single numbers of a unit's state; none before a state exists."""
    group = optimizer.param_groups[unit.plan.group]
    first = unit.plan.layout.fragments(unit.window)[:1]
    if not optimizer.shard_optimizer.foreseen and not any(
        optimizer.shard_optimizer.kept(unit, group, part) for part in first
    ):
        return {}
    return {
        key: optimizer.shard_optimizer.number(unit, group, key)
        for key in optimizer.shard_optimizer.keys(unit, group)[1]
    }


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


def buffer_chunks(buffers: Mapping[str, torch.Tensor]) -> list[TensorChunk]:
    """Whole buffers."""
    return [_whole("buffer", name, value) for name, value in buffers.items()]


def tensor_chunks(tensors: Mapping[str, torch.Tensor]) -> list[TensorChunk]:
    """Whole tensors of client state, of random numbers and the like."""
    return [_whole("tensor", name, value) for name, value in tensors.items()]


def _whole(kind: str, name: str, value: torch.Tensor) -> TensorChunk:
    if value.dtype not in NAMES or value.layout != torch.strided:
        raise ValueError(
            f"{kind} '{name}' is {value.layout} {value.dtype}; a checkpoint holds {', '.join(NAMES.values())}"
        )
    return TensorChunk(kind, name, 0, tuple(value.shape), value.detach().contiguous().view(-1))


def by_file(chunks: Iterable[TensorChunk]) -> dict[str, list[TensorChunk]]:
    """The chunks of each kind of file."""
    files: dict[str, list[TensorChunk]] = {}
    for chunk in chunks:
        files.setdefault(FILES.get(chunk.kind, "moments"), []).append(chunk)
    return files
