"""What one rank has to write of an engine: found out first, then written, straight away or by way of a snapshot."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero.checkpoint.job import Job
from zero.checkpoint.plain import as_json, encode
from zero.checkpoint.safe_file import NAMES, TensorChunk
from zero.checkpoint.saver import Snapshot
from zero.checkpoint.store_barrier import StoreBarrier
from zero.core.unit import Unit
from zero.engine.checkpoint import chunks
from zero.engine.checkpoint.resume import rank_state, shared_state


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
        self._buffers = chunks.saved_buffers(engine.module)
        self._extra = encode(chunks.extra_states(engine.module), "extra_state")
        self._shared = encode(shared_state(engine), "engine_state")
        self._client = encode(client, "client_state")
        self._own = encode(rank_state(engine), f"rank_state/{barrier.rank}")
        self._forms = {unit: list(chunks.unit_chunks(unit, self._optimizer, forms=True)) for unit in self.units}
        self._whole = chunks.whole_chunks("buffer", self._buffers)

    def request(self) -> dict[str, Any]:
        """What rank 0 must know of it before anything is written, as JSON."""
        nbytes = sum(form.values.nbytes for forms in self._forms.values() for form in forms)
        buffers = [] if self._barrier.world_size == 1 else self._buffers.items()
        return {
            "buffers": [[name, *chunks.digest(value)] for name, value in buffers],
            "nbytes": nbytes + sum(chunk.values.nbytes for chunk in self._whole),
            "files": not all(unit.placement.resident for unit in self.units),
        }

    def write(self, job: Job, differ: Sequence[str], snapshot: Snapshot | None) -> list[TensorChunk]:
        """Hand all chunks to the job, or, where they are in memory, to the snapshot; returns what is left to write."""
        small = self._small(job, differ)
        job.begin(chunks.by_file([form for forms in self._forms.values() for form in forms] + small))
        if snapshot is not None:
            kept = [form for unit, forms in self._forms.items() if unit.placement.resident for form in forms]
            snapshot.begin([*kept, *small])
            for chunk in small:
                snapshot.take(chunk)
            small = []
        for unit in self.units:
            with unit.acquired():
                for chunk in chunks.unit_chunks(unit, self._optimizer):
                    if snapshot is not None and unit.placement.resident:
                        snapshot.take(chunk)
                    else:
                        job.put(chunk)
                    job.moved(1)
                job.signed |= chunks.signs(unit, self._optimizer)
        return small

    def _small(self, job: Job, differ: Sequence[str]) -> list[TensorChunk]:
        """Buffers and what comes with them: on rank 0 all, elsewhere what is not as on rank 0."""
        if self._barrier.rank == 0:
            self._describe(job)
            job.own = {"buffers": {}, "state": self._own[0]}
            tensors = {**self._own[1], **self._shared[1], **self._extra[1], **self._client[1]}
            return [*self._whole, *chunks.whole_chunks("tensor", tensors)]
        own = {name: f"rank {self._barrier.rank}/buffer/{name}" for name in differ}
        job.own = {"buffers": own, "state": self._own[0]}
        return chunks.whole_chunks("tensor", {**{own[name]: self._buffers[name] for name in own}, **self._own[1]})

    def _describe(self, job: Job) -> None:
        """Give the job what the index says beside where things lie."""
        for unit in self.units:
            trained = unit.master is not None and self._optimizer is not None
            more = chunks.numbers(unit, self._optimizer) if trained else {}
            group, dtype = unit.plan.group if trained else None, NAMES[unit.shard.dtype]
            for spec, param in zip(unit.plan.params, unit.params, strict=True):
                job.known[spec.name] = {"group": group, "numbers": more, "dtype": dtype, "shape": tuple(param.shape)}
        tied = chunks.tied_names(self._engine.module)
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
