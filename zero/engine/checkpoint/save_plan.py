"""What one rank has to write of an engine: found out first, then written, straight away or by way of a snapshot."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from zero.checkpoint.job import Job
from zero.checkpoint.plain import as_json, encode
from zero.checkpoint.safe_file import NAMES, TensorChunk
from zero.checkpoint.snapshot import Snapshot
from zero.core.unit import Unit
from zero.engine.checkpoint.chunks import (
    buffer_chunks,
    by_file,
    digest,
    extra_states,
    form_of,
    numbers,
    saved_buffers,
    signs,
    tensor_chunks,
    tied_names,
    unit_chunks,
    unit_forms,
)
from zero.optim.optimizer import ZeroOptimizer


class Plain(NamedTuple):
    """What is no tensor of the model: of all ranks alike, of the caller, and of this rank alone."""

    shared: Mapping[str, Any]
    client: Mapping[str, Any]
    own: Mapping[str, Any]


class SavePlan:
    """Of one save. Raises ValueError, naming it, for what a checkpoint cannot hold.

    units: those that are written; excluded: the frozen parameters that are not.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        optimizer: ZeroOptimizer | None,
        plain: Plain,
        rank: int,
        skip_frozen: bool,
    ) -> None:
        self.units = [unit for unit in units if unit.plan.requires_grad or not skip_frozen]
        self.excluded = sorted(spec.name for unit in units if unit not in self.units for spec in unit.plan.params)
        self._module = module
        self._optimizer = optimizer
        if optimizer is not None:
            optimizer.settle()
        for unit in units:
            if unit.edited:
                raise RuntimeError(
                    f"save_checkpoint() inside of GatheredParameters, which has yet to write back unit "
                    f"'{unit.plan.name}'; call it outside"
                )
            unit.take_writes()
        self._buffers = saved_buffers(module)
        self._extra = encode(extra_states(module), "extra_state")
        self._shared = encode(plain.shared, "engine_state")
        self._client = encode(plain.client, "client_state")
        self._own = encode(plain.own, f"rank_state/{rank}")
        self._forms = [form for unit in self.units for form in unit_forms(unit, optimizer)]
        self._checked = [form_of(chunk) for chunk in buffer_chunks(self._buffers)]

    @property
    def in_files(self) -> bool:
        """Whether some of it rests in files, and can only be written during the call."""
        return not all(unit.placement.resident for unit in self.units)

    def request(self, alone: bool) -> dict[str, Any]:
        """What rank 0 must know of it before anything is written, as JSON; `alone`: there is no other rank."""
        every = chain(self._forms, self._checked)
        return {
            "buffers": [] if alone else [[name, *digest(value)] for name, value in self._buffers.items()],
            "nbytes": sum(form.values.nbytes for form in every),
            "files": self.in_files,
        }

    def write(self, job: Job, rank: int, differ: Sequence[str], snapshot: Snapshot | None) -> list[TensorChunk]:
        """Hand all chunks to the job, or, where they are in memory, to the snapshot; returns what is left to write."""
        small = self._small(job, rank, differ)
        job.begin(by_file([*self._forms, *map(form_of, small)]))
        if snapshot is None:
            self._write_units(job, None)
            return small
        kept = [form for unit in self.units if unit.placement.resident for form in unit_forms(unit, self._optimizer)]
        snapshot.begin([*kept, *small])
        for chunk in small:
            snapshot.take(chunk)
        self._write_units(job, snapshot)
        return []

    def describe(self, job: Job, config: Any, step: int) -> None:
        """Give the job, on rank 0, what the index says beside where things lie."""
        job.known = self._known()
        target = job.target
        job.fields = {
            "save": target.save,
            "tag": target.tag,
            "tied": {name: other for name, other in tied_names(self._module).items() if other in job.known},
            "shared": {"global_steps": step, "state": self._shared[0], "extra_state": self._extra[0]},
            "client": self._client[0],
            "config": as_json(config),
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            "rotates": target.latest,
            "excluded": tuple(self.excluded),
        }

    def _small(self, job: Job, rank: int, differ: Sequence[str]) -> list[TensorChunk]:
        """Buffers and what comes with them: on rank 0 all, elsewhere what is not as on rank 0."""
        own = {} if rank == 0 else {name: f"rank {rank}/buffer/{name}" for name in differ}
        job.own = {"buffers": own, "state": self._own[0]}
        tensors = {**{own[name]: self._buffers[name] for name in own}, **self._own[1]}
        if rank == 0:
            tensors |= {**self._shared[1], **self._extra[1], **self._client[1]}
        return [*(buffer_chunks(self._buffers) if rank == 0 else ()), *tensor_chunks(tensors)]

    def _write_units(self, job: Job, snapshot: Snapshot | None) -> None:
        for unit in self.units:
            with unit.acquired():
                for chunk in unit_chunks(unit, self._optimizer):
                    if snapshot is not None and unit.placement.resident:
                        snapshot.take(chunk)
                    else:
                        job.put(chunk)
                    job.moved(1)
                job.signed |= signs(unit, self._optimizer)

    def _known(self) -> dict[str, dict[str, Any]]:
        known = {}
        for unit in self.units:
            trained = unit.master is not None and self._optimizer is not None
            more = numbers(unit, self._optimizer) if trained else {}
            group = unit.plan.group if trained else None
            for spec, param in zip(unit.plan.params, unit.params, strict=True):
                dtype = NAMES[unit.shard.dtype]
                known[spec.name] = {"group": group, "numbers": more, "dtype": dtype, "shape": tuple(param.shape)}
        return known
