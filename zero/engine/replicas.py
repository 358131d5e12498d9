"""Compares the values that several ranks hold, bit by bit.

Compared are: parameters that are not resharded; where nothing is cut (stage 0), masters and moments too; the module's
buffers; hyperparameters and the loss scale. What is cut is compared between replicas of it (HSDP), unit by unit. What
exists once, as all state does under stage 3 and all but the parameters under stages 1 and 2, has nothing to be compared
with: a bit that flips there becomes the value of all.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zero.core import comm
from zero.core.agree import agree
from zero.core.mesh import Mesh
from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit
from zero.engine.hashing import hash_of, hash_spans, hash_tensor
from zero.log import rank_zero
from zero.optim.optimizer import ZeroOptimizer
from zero.plan.layout import Fragment, Span
from zero.watchdog.hang_report import ranks_text

_AGE = 0x5851F42D4C957F2D  # odd, so that no earlier step is lost from a hash over steps


class LabelledHashes(NamedTuple):
    """Hashes, int64 [n], of what belongs together; labels [n]; among: what only the ranks that hold it agree in."""

    place: str
    labels: Sequence[str]
    hashes: torch.Tensor
    among: tuple[Any, ...]

    @property
    def key(self) -> int:
        """A key that is the same on the ranks that hold the same, and on no others."""
        return _hash_text(f"{self.place} {self.among}")


class Replicas:
    """Compares every `every` optimizer steps, before the update.

    Under stages 1 and 2 each update overwrites parameters with their owner's, and so would wipe out the trace of a
    difference or spread it; there the parameters are hashed at every step, and the hashes of all steps compared.

    A buffer that differs at the first comparison is meant to (statistics of BatchNorm are each rank's own): it is
    named in a warning and left out from then on.
    """

    def __init__(self, sharded: ShardedModule, optimizer: ZeroOptimizer, every: int) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._every = every
        self._axis = sharded.world
        self._most = 0  # tables on any rank; 0 until the first comparison
        self._whole = [unit for unit in sharded.units if not unit.resharded]
        # By index of the unit: hashes over the steps since the last comparison.
        self._seen: dict[int, torch.Tensor] = {}
        self._own_buffers: set[str] | None = None  # buffers that are each rank's own; None until the first comparison

    @torch.no_grad()
    def before_step(self, number: int) -> None:
        """Optimizer step `number` is about to be taken; collective at every `every`-th.

        Raises RuntimeError on all ranks, without the step and with its gradients forgotten, when something differs;
        names the first such thing and the ranks that are not with the majority.
        """
        if self._axis.size == 1:
            return
        due = number % self._every == 0
        for unit in self._whole:
            if due or (unit.gradients is not None and unit.mesh.shard.size > 1):  # an update overwrites it
                self._look(unit)
        if due:
            try:
                self._compare(number)
            finally:
                self._seen = {}

    @property
    def own_buffers(self) -> list[str] | None:
        """Names of the buffers that are each rank's own; None before the first comparison."""
        return None if self._own_buffers is None else sorted(self._own_buffers)

    def resume(self, own_buffers: Sequence[str] | None) -> None:
        """Forget what was seen of the parameters before; leave out the buffers that another run has left out."""
        self._seen = {}
        self._own_buffers = None if own_buffers is None else set(own_buffers)

    def _look(self, unit: Unit) -> None:
        unit.gather()
        unit.wait()
        hashes = hash_spans(unit.buffer.full, list(unit.plan.layout.spans.values()))
        before = self._seen.get(unit.index)
        self._seen[unit.index] = hashes if before is None else before * _AGE + hashes

    def _compare(self, number: int) -> None:
        # Hyperparameters first: where they differ, the parameters do because of them.
        tables = [self._of_optimizer(), *(self._of_unit(unit) for unit in self._whole), self._of_buffers()]
        tables += self._of_shards()
        self._most = self._most or max(agree(len(tables), self._axis))
        device, empty = tables[0].hashes.device, [0, 0] * (self._most - len(tables))
        keys = torch.tensor([number for table in tables for number in (table.key, len(table.labels))] + empty)
        hashes = [hash_of(table.hashes) for table in tables] + [*torch.zeros(len(empty) // 2, dtype=torch.int64)]
        mine = torch.cat([keys.to(device), torch.stack([each.to(device) for each in hashes])])
        found: dict[int, list[tuple[int, int]]] = {}
        for row in comm.gather_scalars(mine, self._axis, "comparison of replicas").tolist():
            for at in range(self._most):
                found.setdefault(row[2 * at], []).append((row[2 * at + 1], row[2 * self._most + at]))
        own: set[str] = set()
        for key, held in found.items():
            if key and len(set(held)) > 1:
                own |= self._examine(number, next((table for table in tables if table.key == key), None))
        if own:
            text = "zero.check_replicas: these buffers differ between ranks from the start and are not compared: %s"
            rank_zero(logging.WARNING, text, ", ".join(sorted(own)))
        self._own_buffers = own if self._own_buffers is None else self._own_buffers

    def _examine(self, number: int, table: LabelledHashes | None) -> set[str]:
        """Find what differs in a table, which not all ranks have: buffers of the first comparison, else it raises."""
        said = agree(table and [table.place, [*table.labels], table.hashes.tolist()], self._axis)
        held = {rank: each for rank, each in zip(self._axis.ranks, said, strict=True) if each}
        place, labels, _ = next(iter(held.values()))
        if len({len(names) for _, names, _ in held.values()}) > 1:
            self._fail(number, f"the number of {place}", [len(names) for _, names, _ in held.values()], [*held])
        rows = torch.tensor([hashes for *_, hashes in held.values()])
        differing = (rows != rows[0]).any(0).nonzero().flatten().tolist()
        if place == "buffers" and self._own_buffers is None:
            return {labels[column] for column in differing}
        where = "" if place in ("buffers", "optimizer", "shards") else f" of unit '{place}'"
        self._fail(number, f"{labels[differing[0]]}{where}", rows[:, differing[0]].tolist(), [*held])
        return set()

    def _fail(self, number: int, what: str, values: list[int], ranks: Sequence[int]) -> None:
        self._sharded.abandon()
        who = _parties(values, ranks)
        since = f" or in one of the {self._every - 1} before" if self._every > 1 else ""
        raise RuntimeError(
            f"zero.check_replicas: {what} is not the same on all ranks: {who}; found at optimizer step "
            f"{number}, before its update{since}. Memory has failed, or code changes it on some ranks only; "
            f"go back to a checkpoint from before (rank {self._sharded.world.global_rank})"
        )

    def _of_unit(self, unit: Unit) -> LabelledHashes:
        labels = [f"parameter '{name}'" for name in unit.plan.layout.spans]
        hashes = [self._seen[unit.index]]
        for name, held, tensor in self._state(unit) if unit.mesh.shard.size == 1 else ():
            inside = unit.plan.layout.fragments(held)
            if tensor.numel() == held.numel:
                labels += [f"{name} of parameter '{piece.name}'" for piece in inside]
            else:
                labels.append(f"{name} of parameter '{inside[0].name}' or one behind it")
            hashes.append(_hashes(inside, held, tensor))
        return LabelledHashes(unit.plan.name, labels, torch.cat(hashes), self._holders(unit.mesh, whole=True))

    def _of_shards(self) -> Iterator[LabelledHashes]:
        """Hashes of shards that are repeated: for each mesh one of each unit, of which ranks have different parts."""
        for mesh in {id(unit.mesh): unit.mesh for unit in self._sharded.units}.values():
            among = self._holders(mesh)
            if mesh.shard.size == 1 or len(among) == 1:
                continue
            labels, hashes = [], []
            for unit in self._sharded.units:
                if unit.mesh is not mesh or (not unit.resharded and unit.gradients is None):
                    continue
                with unit.shard.acquired():
                    kept = [("the shard", unit.shard.window, unit.shard.values), *self._state(unit)]
                    found = [_hashes(unit.plan.layout.fragments(held), held, tensor) for _, held, tensor in kept]
                    hashes.append(hash_of(torch.cat([each.to(self._sharded.device) for each in found])))
                labels.append(f"the shard of unit '{unit.plan.name}', or its optimizer state,")
            yield self._table("shards", labels, hashes, (among, mesh.axes))

    def _holders(self, mesh: Mesh, whole: bool = False) -> tuple[int, ...]:
        """Places in the world of the ranks that hold the same shards as this one, or the same parameters."""
        axes = (*mesh.axes.replica, *mesh.axes.same, *(mesh.axes.shard if whole else ()))
        return self._sharded.meshes.grid.ranks(axes, self._axis.rank)

    def _state(self, unit: Unit) -> Iterator[tuple[str, Span, torch.Tensor]]:
        """Masters and moments of a unit, as `ShardOptimizer` lists them."""
        if unit.gradients is None:
            return
        if unit.shard.master.rounding is not None:
            yield "the master", unit.shard.window, unit.shard.master.tensor
        yield from self._optimizer.states.tensors(unit)

    def _of_buffers(self) -> LabelledHashes:
        left_out = self._own_buffers or set()
        named = {f"buffer '{name}'": buffer for name, buffer in self._sharded.module.named_buffers()}
        kept = {name: buffer for name, buffer in named.items() if name not in left_out and buffer.numel()}
        hashes = [hash_tensor(buffer) for buffer in kept.values()]
        return self._table("buffers", list(kept), hashes, tuple(self._sharded.meshes.same_part.ranks))

    def _of_optimizer(self) -> LabelledHashes:
        values = {"the loss scale": _plain(self._optimizer.loss_scale)}
        for index, group in enumerate(self._optimizer.param_groups):
            for key in sorted(group):
                values[f"'{key}' of parameter group {index}"] = _plain(group[key]) if key != "params" else None
        kept = {label: text for label, text in values.items() if text is not None}
        return self._table("optimizer", list(kept), [torch.tensor(_hash_text(text)) for text in kept.values()], ())

    def _table(
        self, place: str, labels: list[str], hashes: list[torch.Tensor], among: tuple[Any, ...]
    ) -> LabelledHashes:
        device = self._sharded.device
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        found = torch.stack([value.to(device) for value in hashes]) if hashes else empty
        return LabelledHashes(place, labels, found, among)


def _hashes(inside: Sequence[Fragment], held: Span, tensor: torch.Tensor) -> torch.Tensor:
    """Hashes of the fragments among the elements held, int64 [n]; one for all where there are fewer numbers."""
    if tensor.numel() != held.numel:
        return hash_tensor(tensor)[None]
    return hash_spans(tensor.view(-1), [Span(piece.at, piece.numel) for piece in inside])


def _parties(values: Sequence[int], ranks: Sequence[int]) -> str:
    """The ranks that are alone with their values, in words."""
    holders: dict[int, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    groups = sorted(holders.values(), key=len, reverse=True)
    first, *others = [ranks_text(group) for group in groups]
    if len(groups[0]) == len(groups[1]):
        return f"{' and '.join([first, *others])} hold different values, and no value has a majority"
    return f"{' and '.join(others)} differ{'s' * (len(values) - len(groups[0]) == 1)} from {first}"


def _plain(value: Any) -> str | None:
    """A hyperparameter as text, None for what has no value of its own to compare."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (tuple, list)):
        parts = [_plain(item) for item in value]
        return None if None in parts else f"({', '.join(parts)})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else None


def _hash_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
