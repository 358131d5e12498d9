"""What one rank has to write of an engine: its part of every unit, each element once over all ranks, on every stage.

It is found out first, then written, straight away or by way of a snapshot.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA

from zero.checkpoint.job import Job
from zero.checkpoint.plain import as_json, encode
from zero.checkpoint.safe_file import NAMES, TensorChunk, dtype_name
from zero.checkpoint.saver import Snapshot
from zero.checkpoint.staging import host_bytes
from zero.checkpoint.store_barrier import StoreBarrier
from zero.core.owner import owner_of
from zero.core.unit import Unit
from zero.engine.checkpoint.resume import rank_state, shared_state
from zero.kernels.crc32 import crc32
from zero.kernels.moments import BLOCK, Moment, blocks_of
from zero.optim.optimizer import ZeroOptimizer
from zero.plan.cut import Cut
from zero.plan.layout import Fragment
from zero.plan.units import ParamSpec

FILES = {"weight": "weights", "buffer": "weights", "master": "masters", "tensor": "state"}  # all others: moments


class SavePlan:
    """Of one save. Raises ValueError, naming it, for what a checkpoint cannot hold.

    units: those that are written; excluded: the frozen parameters that are not.
    """

    def __init__(
        self, engine: Any, units: Sequence[Unit], client: Mapping[str, Any], barrier: StoreBarrier, skip_frozen: bool
    ) -> None:
        self.units = [unit for unit in units if unit.plan.requires_grad or not skip_frozen]
        self.excluded = sorted(spec.name for unit in units if unit not in self.units for spec in unit.plan.params)
        self._engine = engine
        self._optimizer = engine.optimizer
        self._barrier = barrier
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
        self._extra = encode(_extra_states(engine.module), "extra_state")
        self._shared = encode(shared_state(engine), "engine_state")
        self._client = encode(client, "client_state")
        self._own = encode(rank_state(engine), f"rank_state/{barrier.rank}")
        self._forms = {unit: list(_unit_chunks(unit, self._optimizer, forms=True)) for unit in self.units}
        self._whole = _whole_chunks("buffer", self._buffers)

    def request(self) -> dict[str, Any]:
        """What rank 0 must know of it before anything is written, as JSON."""
        nbytes = sum(form.values.nbytes for forms in self._forms.values() for form in forms)
        buffers = [] if self._barrier.world_size == 1 else self._buffers.items()
        return {
            "buffers": [[name, *_digest(value)] for name, value in buffers],
            "nbytes": nbytes + sum(chunk.values.nbytes for chunk in self._whole),
            "files": not all(unit.placement.resident for unit in self.units),
        }

    def write(self, job: Job, differ: Sequence[str], snapshot: Snapshot | None) -> list[TensorChunk]:
        """Hand all chunks to the job, or, where they are in memory, to the snapshot; returns what is left to write."""
        small = self._small(job, differ)
        job.begin(_by_file([form for forms in self._forms.values() for form in forms] + small))
        if snapshot is not None:
            kept = [form for unit, forms in self._forms.items() if unit.placement.resident for form in forms]
            snapshot.begin([*kept, *small])
            for chunk in small:
                snapshot.take(chunk)
            small = []
        for unit in self.units:
            with unit.acquired():
                for chunk in _unit_chunks(unit, self._optimizer):
                    if snapshot is not None and unit.placement.resident:
                        snapshot.take(chunk)
                    else:
                        job.put(chunk)
                    job.moved(1)
                job.signed |= _signs(unit, self._optimizer)
        return small

    def _small(self, job: Job, differ: Sequence[str]) -> list[TensorChunk]:
        """Buffers and what comes with them: on rank 0 all, elsewhere what is not as on rank 0."""
        if self._barrier.rank == 0:
            self._describe(job)
            job.own = {"buffers": {}, "state": self._own[0]}
            tensors = {**self._own[1], **self._shared[1], **self._extra[1], **self._client[1]}
            return [*self._whole, *_whole_chunks("tensor", tensors)]
        own = {name: f"rank {self._barrier.rank}/buffer/{name}" for name in differ}
        job.own = {"buffers": own, "state": self._own[0]}
        return _whole_chunks("tensor", {**{own[name]: self._buffers[name] for name in own}, **self._own[1]})

    def _describe(self, job: Job) -> None:
        """Give the job what the index says beside where things lie."""
        for unit in self.units:
            trained = unit.master is not None and self._optimizer is not None
            more = _numbers(unit, self._optimizer) if trained else {}
            group, dtype = unit.plan.group if trained else None, NAMES[unit.shard.dtype]
            for spec, param in zip(unit.plan.params, unit.params, strict=True):
                shape = _full(spec, param).shape
                job.known[spec.name] = {"group": group, "numbers": more, "dtype": dtype, "shape": shape}
        tied = _tied_names(self._engine.module)
        steps = self._engine.global_steps
        job.fields = {
            "save": job.save,
            "tag": job.tag,
            "tied": {name: other for name, other in tied.items() if other in job.known},
            "shared": {"global_steps": steps, "state": self._shared[0], "extra_state": self._extra[0]},
            "client": self._client[0],
            "config": as_json(self._engine.config),
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            "rotates": job.latest,
            "excluded": tuple(self.excluded),
        }


def _unit_chunks(unit: Unit, optimizer: ZeroOptimizer | None, forms: bool = False) -> Iterator[TensorChunk]:
    """The chunks of a unit that this rank writes; views that are valid while the unit is borrowed.

    `forms`: without values, on the meta device, and without bringing any.
    """
    take = _form if forms else torch.Tensor.narrow
    full = {spec.name: _full(spec, param) for spec, param in zip(unit.plan.params, unit.params, strict=True)}
    # That of a cut along all ranks, whatever is cut.
    window = unit.span
    shift = window.start - unit.window.start  # of what is written in what is kept
    for fragment in unit.plan.layout.fragments(window):
        part, numel = fragment._replace(at=fragment.at + shift), fragment.numel
        weight = take(unit.shard, 0, part.at, numel)
        chunk = TensorChunk("weight", part.name, part.start, full[part.name].shape, weight, full[part.name].boxes)
        yield chunk
        if unit.master is None or optimizer is None:
            continue
        if unit.master.tensor is not unit.master.shard:
            yield chunk._replace(kind="master", values=take(unit.master.tensor, 0, part.at, numel))
        for name, moment in _moments(unit, optimizer, part, forms).items():
            yield chunk._replace(kind=name, values=take(moment.values, 0, 0, numel))
            if moment.scales is not None:
                scales, shape = take(moment.scales, 0, 0, blocks_of(numel)), (blocks_of(math.prod(chunk.shape)),)
                cut = full[part.name].in_blocks(BLOCK) if chunk.boxes else Cut(shape, ())
                yield TensorChunk(f"scales.{name}", part.name, part.start // BLOCK, cut.shape, scales, cut.boxes)
    if unit.master is not None and optimizer is not None:
        for name, first, of, rows in optimizer.shard_optimizer.rows(unit, optimizer.param_groups[unit.plan.group]):
            yield TensorChunk("scales.rows", name, first, (of,), take(rows, 0, 0, rows.numel()))


def _full(spec: ParamSpec, param: torch.Tensor) -> Cut:
    """The parameter of which this one is a part; without boxes where it is all of it."""
    return Cut(tuple(param.shape), ()) if spec.cut is None else spec.cut


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


def _signs(unit: Unit, optimizer: ZeroOptimizer | None) -> dict[str, bool]:
    """Whether each moment of a unit can be negative; while the unit is borrowed."""
    if unit.master is None or optimizer is None:
        return {}
    rule, group = optimizer.shard_optimizer, optimizer.param_groups[unit.plan.group]
    first = unit.plan.layout.fragments(unit.window)[:1]
    return {key: kept.signed for part in first for key, kept in rule.kept(unit, group, part).items()}


def _numbers(unit: Unit, optimizer: ZeroOptimizer) -> dict[str, float]:
    """The single numbers of a unit's state; none before a state exists."""
    rule, group = optimizer.shard_optimizer, optimizer.param_groups[unit.plan.group]
    first = unit.plan.layout.fragments(unit.window)[:1]
    if not rule.foreseen and not any(rule.kept(unit, group, part) for part in first):
        return {}
    return {key: rule.number(unit, group, key) for key in rule.keys(unit, group)[1]}


def _tied_names(module: nn.Module) -> dict[str, str]:
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


def _extra_states(module: nn.Module) -> dict[str, Any]:
    """What modules give of themselves by `get_extra_state`, by its name in a state_dict."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if name.rpartition(".")[2] == EXTRA}


def _digest(value: torch.Tensor) -> list[Any]:
    """What is equal for equal tensors, and hardly ever else; JSON."""
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


def _by_file(chunks: Iterable[TensorChunk]) -> dict[str, list[TensorChunk]]:
    """The chunks of each kind of file."""
    files: dict[str, list[TensorChunk]] = {}
    for chunk in chunks:
        files.setdefault(FILES.get(chunk.kind, "moments"), []).append(chunk)
    return files
