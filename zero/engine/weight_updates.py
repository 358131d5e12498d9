"""The weights that changed since a given step: exactly those values, for a copy of the model in another program."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from zero.core import comm
from zero.core.agree import agree
from zero.core.owner import owner_of
from zero.core.sharded_module import ShardedModule
from zero.core.unit import TAGS, Unit
from zero.core.values import is_part
from zero.engine.status import Status
from zero.engine.weight_streams import Listed, list_tensors, to_the_end, walk
from zero.kernels.marks import Changes, WeightUpdate, nbytes, unpack
from zero.log import rank_zero

_KEPT = 4  # of so many calls the marks are kept, one bit for each element of the shard and call
_MOST = 0.4  # the part of a tensor that may have changed for it not to come whole
_LAST_INDEX = 2**31 - 1
_NOTHING, _MARKED, _ALL = 0, 1, 2


class WeightUpdates:
    """Marks what changes, and gives it to callers."""

    def __init__(self, sharded: ShardedModule, status: Status, track: bool) -> None:
        self._sharded = sharded
        self._status = status
        self._kept: list[tuple[int, list[Changes]]] = []  # by the step at which they begin; in the last ones is marked
        if track:
            self._begin()

    def weight_updates(self, since: int | None = None, *, rank0_only: bool = False) -> Iterator[WeightUpdate]:
        """Yield the weights that changed since step `since`, unit by unit: those alone make the weights of then new.

        since: `engine.global_steps` at an earlier call, of which the last four are known, or, with `zero.track_updates`
               in the JSON, at the start; None: all weights. The first call begins to mark what changes, a bit for each
               parameter. For a step that is not known all weights come whole, which is logged.
        rank0_only: the other ranks get nothing, and only help.

        Names, order and what holds of loops and tensors are those of `stream_weights`. What has not changed does
        not come. Whole come: buffers, a tensor of which more than 40 % has changed, and after a load or another write
        between steps the tensors of its unit. Writes through `param.data` outside of `GatheredParameters` are not seen.
        A collective, already before the first item.
        """
        self._status.check()
        for unit in self._sharded.units:
            _take_writes(unit)
        steps = [step for step, _ in self._kept]
        known = since is not None and since in steps
        if since is not None and not known:
            rank_zero(
                logging.WARNING,
                "weight_updates(since=%s): marks begin at the steps %s; all weights come whole",
                since,
                steps or "after this call",
            )
        asked = [changes for _, changes in self._kept[steps.index(since) :]] if known else []
        codes = self._agreed(asked, since)
        if steps[-1:] != [self._status.global_steps]:
            self._begin()
        tensors = list_tensors(self._sharded.module.state_dict(keep_vars=True), self._sharded)
        tensors = [each for each in tensors if self._code(each, codes) != _NOTHING]
        here = not rank0_only or self._sharded.world.writes
        return to_the_end(self._found(tensors, asked, codes), self._status, here)

    def _begin(self) -> None:
        units = self._sharded.units
        self._kept.append((self._status.global_steps, [unit.shard.watch_changes() for unit in units]))
        del self._kept[:-_KEPT]

    def _agreed(self, asked: list[list[Changes]], since: int | None) -> dict[str, int]:
        """The code of each unit, over all ranks; RuntimeError where they ask for different things."""
        own = {}
        for unit in self._sharded.units:
            of_unit = [changes[unit.index] for changes in asked]
            marked = _MARKED if any(each.steps is not None for each in of_unit) else _NOTHING
            own[_key(unit)] = _ALL if not asked or any(each.all for each in of_unit) else marked
        said = agree([-1 if since is None else since, len(asked), own], self._sharded.world)
        if len({(step, count) for step, count, _ in said}) > 1:
            raise RuntimeError(
                f"weight_updates(since=...): the ranks gave {[step for step, *_ in said]} (-1 for None); it is a "
                "collective, which all must call with one step"
            )
        return {key: max(codes.get(key, _NOTHING) for *_, codes in said) for key in own}

    def _code(self, item: Listed, codes: dict[str, int]) -> int:
        owner = owner_of(item.value)
        if item.holder is not None or owner is None or owner.unit not in self._sharded.units:
            return _ALL
        code = codes[_key(owner.unit)]
        return _ALL if code == _MARKED and is_part(owner) else code

    @torch.no_grad()
    def _found(
        self, tensors: list[Listed], asked: list[list[Changes]], codes: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        at, marks = None, None
        for item, tensor in walk(tensors, self._sharded):
            owner, name = owner_of(item.value), item.names[0]
            if self._code(item, codes) == _ALL:
                yield WeightUpdate(name, None, tensor.clone())
                continue
            if at is not owner.unit:
                at, marks = owner.unit, _marks(owner.unit, [changes[owner.unit.index].steps for changes in asked])
            own = marks.narrow(0, owner.unit.plan.layout.spans[owner.name].start // 8, nbytes(tensor.numel()))
            if (update := _difference(name, tensor, own)) is not None:
                yield update


def _key(unit: Unit) -> str:
    """The name of a unit that all ranks know."""
    return unit.plan.params[0].name


def _take_writes(unit: Unit) -> None:
    """Have what was written into a unit outside of steps noted; and no update run."""
    unit.shard.settle()
    unit.take_writes()
    if unit.shard.master is None and not unit.resharded and unit.shard.changes is not None and unit.buffer.written():
        unit.shard.changes.all = True  # a frozen one, of which nobody else asks
        unit.buffer.note_versions()


def _marks(unit: Unit, parts: list[torch.Tensor | None]) -> torch.Tensor:
    """All ranks' marks of one unit [numel / 8], from this rank's; collective."""
    marks = torch.zeros(nbytes(unit.plan.layout.numel), dtype=torch.uint8, device=unit.buffer.full.device)
    own = marks.narrow(0, unit.shard.window.start // 8, nbytes(unit.shard.window.numel))
    for part in parts:
        if part is not None:
            own |= part.to(own.device)
    comm.gather(marks, unit.mesh.shard, TAGS * unit.index).wait()
    return marks


def _difference(name: str, tensor: torch.Tensor, marks: torch.Tensor) -> WeightUpdate | None:
    """The marked values of a tensor, copied, in the fewest bytes; None where nothing is."""
    indices = unpack(marks, tensor.numel()).nonzero().view(-1)
    changed = len(indices)
    if not changed:
        return None
    if changed > _MOST * tensor.numel():
        return WeightUpdate(name, None, tensor.clone())
    fewer = 4 * changed <= len(marks) and tensor.numel() <= _LAST_INDEX
    return WeightUpdate(name, indices.int() if fewer else marks.clone(), tensor.reshape(-1)[indices])
