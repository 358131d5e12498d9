"""The part of an engine that one rank saves: of every unit, each element once over all ranks, on every stage."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA

from zero.checkpoint.plain_values import as_json, encode
from zero.checkpoint.safe_file import NAMES, TensorChunk, dtype_name
from zero.checkpoint.staging import host_bytes
from zero.core.owner import owner_of
from zero.core.unit import Unit
from zero.core.world import World
from zero.engine.checkpoint import random_state
from zero.engine.checkpoint.resume import shared_state
from zero.kernels.crc32 import crc32
from zero.kernels.moments import BLOCK, Moment, blocks_of
from zero.optim.optimizer import ZeroOptimizer
from zero.plan.cut import Cut
from zero.plan.layout import Fragment
from zero.plan.units import ParamSpec


class SavedState:
    """Of one save, found out before anything is written. Raises ValueError, naming it, for what no checkpoint can hold.

    units: those that are written; forms: the chunks of each unit, on the meta device.
    """

    def __init__(self, engine: Any, units: Sequence[Unit], client: Mapping[str, Any], skip_frozen: bool) -> None:
        self.units = [unit for unit in units if unit.plan.requires_grad or not skip_frozen]
        left_out = [unit for unit in units if unit not in self.units and _is_first(unit)]
        self._excluded = [spec.name for unit in left_out for spec in unit.plan.params]
        self._engine = engine
        self._optimizer = engine.optimizer
        self._world: World = engine._sharded.world
        if self._optimizer is not None:
            self._optimizer.settle()
        for unit in units:
            if unit.edited:
                raise RuntimeError(
                    f"save_checkpoint() inside of GatheredParameters, which has yet to write back unit "
                    f"'{unit.plan.name}'; call it outside"
                )
            unit.take_writes()
        self._buffers = saved_buffers(engine.module)
        state = engine.module.state_dict(keep_vars=True)  # with what modules give by `get_extra_state`
        self._extra_of = {name: value for name, value in state.items() if name.rpartition(".")[2] == EXTRA}
        self._extra = encode(self._extra_of, "extra_state")
        self._shared = encode(shared_state(engine), "engine_state")
        self._client = encode(client, "client_state")
        self._own = encode({"random": random_state.capture(engine.device)}, f"rank_state/{self._world.rank}")
        self.forms = {unit: list(_unit_chunks(unit, self._optimizer, forms=True)) for unit in self.units}
        self._whole = _whole_chunks("buffer", self._buffers)

    def request(self) -> dict[str, Any]:
        """The facts that rank 0 must know before anything is written, as JSON."""
        nbytes = sum(form.values.nbytes for forms in self.forms.values() for form in forms)
        alone = self._world.size == 1
        return {
            "buffers": {} if alone else {name: _digest(value) for name, value in self._buffers.items()},
            "extra": [] if alone else [*self._extra_of],
            "alike": self._engine._sharded.meshes.same_part.ranks[0],
            "nbytes": nbytes + sum(chunk.values.nbytes for chunk in self._whole),
            "files": not all(unit.shard.placement.resident for unit in self.units),
        }

    def small(
        self, differ: Sequence[str], first: Mapping[str, int]
    ) -> tuple[list[TensorChunk], dict[str, Any], dict[str, Any]]:
        """Buffers and what comes with them; `SavePlan.own`; and the states of modules, as JSON.

        A buffer or state is of the first rank that has it; of others' what is not the same is written, too.
        differ: names of the buffers that are not the same on all ranks; first: the first rank that has a name, where
        that is not rank 0.
        """
        rank = self._world.rank
        whole = {name: value for name, value in self._buffers.items() if first.get(name, 0) == rank}
        own = {name: f"rank {rank}/buffer/{name}" for name in differ if name in self._buffers and name not in whole}
        extra = self._extra
        if not self._world.writes:
            held = {name: value for name, value in self._extra_of.items() if first.get(name, 0) == rank}
            extra = encode(held, f"rank {rank}/extra_state")
        tensors = {**{own[name]: self._buffers[name] for name in own}, **self._own[1], **extra[1]}
        if self._world.writes:
            tensors |= self._shared[1] | self._client[1]
        chunks = [*_whole_chunks("buffer", whole), *_whole_chunks("tensor", tensors)]
        return chunks, {"buffers": own, "state": self._own[0]}, extra[0]

    def chunks(self, small: Sequence[TensorChunk]) -> Iterator[tuple[TensorChunk, bool]]:
        """These and those of all units, each valid until the next, and whether it lies in memory and not in files."""
        yield from ((chunk, True) for chunk in small)
        for unit in self.units:
            with unit.shard.acquired():
                for chunk in _unit_chunks(unit, self._optimizer):
                    yield chunk, unit.shard.placement.resident

    def model(self) -> dict[str, Any]:
        """What the index says of the parameters that no rank before this one has, beside where they lie; JSON."""
        known: dict[str, dict[str, Any]] = {}
        for unit in filter(_is_first, self.units):
            trained = unit.shard.master is not None and self._optimizer is not None
            more = _numbers(unit, self._optimizer) if trained else {}
            group, dtype = unit.plan.group if trained else None, NAMES[unit.shard.values.dtype]
            for spec, param in zip(unit.plan.params, unit.params, strict=True):
                known[spec.name] = {"group": group, "numbers": more, "dtype": dtype, "shape": _full(spec, param).shape}
        owners = {name: owner_of(param) for name, param in self._engine.module.named_parameters(remove_duplicate=False)}
        tied = {name: owner.name for name, owner in owners.items() if owner is not None and owner.name in known}
        tied = {name: other for name, other in tied.items() if other != name}
        return {"known": known, "tied": tied, "excluded": self._excluded}

    def fields(self, save: str, tag: str, latest: bool) -> dict[str, Any]:
        """What it says of all, see `assemble`."""
        return {
            "save": save,
            "tag": tag,
            "shared": {"global_steps": self._engine.global_steps, "state": self._shared[0]},
            "client": self._client[0],
            "config": as_json(self._engine.config),
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            "rotates": latest,
        }


def _is_first(unit: Unit) -> bool:
    """Whether no rank before this one has the same of it."""
    return unit.mesh.data.rank == 0 and unit.mesh.counts


def _unit_chunks(unit: Unit, optimizer: ZeroOptimizer | None, forms: bool = False) -> Iterator[TensorChunk]:
    """The chunks of a unit that this rank writes; views that are valid while the unit is borrowed.

    `forms`: without values, on the meta device, and without bringing any.
    """
    take = _form if forms else torch.Tensor.narrow
    full = {spec.name: _full(spec, param) for spec, param in zip(unit.plan.params, unit.params, strict=True)}
    # Each rank writes its part of a unit that is cut over all ranks, also where the unit is not cut.
    window = unit.span
    shift = window.start - unit.shard.window.start  # of what is written in what is kept
    for fragment in unit.plan.layout.fragments(window):
        part, numel = fragment._replace(at=fragment.at + shift), fragment.numel
        weight = take(unit.shard.values, 0, part.at, numel)
        chunk = TensorChunk("weight", part.name, part.start, full[part.name].shape, weight, full[part.name].boxes)
        yield chunk
        if unit.shard.master is None or optimizer is None:
            continue
        if unit.shard.master.tensor is not unit.shard.master.shard:
            yield chunk._replace(kind="master", values=take(unit.shard.master.tensor, 0, part.at, numel))
        for name, (moment, signed) in _moments(unit, optimizer, part, forms).items():
            yield chunk._replace(kind=name, values=take(moment.values, 0, 0, numel), signed=signed)
            if moment.scales is not None:
                scales, shape = take(moment.scales, 0, 0, blocks_of(numel)), (blocks_of(math.prod(chunk.shape)),)
                cut = full[part.name].in_blocks(BLOCK) if chunk.boxes else Cut(shape, ())
                yield TensorChunk(f"scales.{name}", part.name, part.start // BLOCK, cut.shape, scales, cut.boxes)
    if unit.shard.master is not None and optimizer is not None:
        for name, first, of, rows in optimizer.states.rows(unit, optimizer.param_groups[unit.plan.group]):
            yield TensorChunk("scales.rows", name, first, (of,), take(rows, 0, 0, rows.numel()))


def _full(spec: ParamSpec, param: torch.Tensor) -> Cut:
    """The parameter of which this one is a part; without boxes where it is all of it."""
    return Cut(tuple(param.shape), ()) if spec.cut is None else spec.cut


def _moments(
    unit: Unit, optimizer: ZeroOptimizer, part: Fragment, forms: bool
) -> Mapping[str, tuple[Moment, bool | None]]:
    """The states of a fragment; for their `forms` only, where they rest in files, those of a run that it is in."""
    rule, group = optimizer.states, optimizer.param_groups[unit.plan.group]
    if not forms or unit.shard.placement.state_store.resident:
        return rule.kept(unit, group, part)
    # Only rules that know their state beforehand let it rest in files.
    states = rule.of(unit, group)
    there = next((moments for run, moments in states.runs if run.start <= part.at < run.start + run.numel), ())
    return {name: (moment, None) for name, moment in zip(states.names, there, strict=False)}


def _form(tensor: torch.Tensor, dim: int, start: int, numel: int) -> torch.Tensor:
    """What `narrow` gives, without values, and also of a tensor that is away."""
    return torch.empty(numel, dtype=tensor.dtype, device="meta")


def _numbers(unit: Unit, optimizer: ZeroOptimizer) -> dict[str, float]:
    """The single numbers of a unit's state; none before a state exists."""
    rule, group = optimizer.states, optimizer.param_groups[unit.plan.group]
    first = unit.plan.layout.fragments(unit.shard.window)[:1]
    if not rule.foreseen and not any(rule.kept(unit, group, part) for part in first):
        return {}
    return {key: rule.number(unit, group, key) for key in rule.keys(unit, group)[1]}


def saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a state_dict, by name."""
    state = module.state_dict(keep_vars=True)
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    }


def _digest(value: torch.Tensor) -> list[Any]:
    """A digest of a tensor; JSON."""
    flat = value.detach().cpu().contiguous()
    return [dtype_name(value.dtype), list(value.shape), crc32(host_bytes(flat))]


def _whole_chunks(kind: str, tensors: Mapping[str, torch.Tensor]) -> list[TensorChunk]:
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
