"""A checkpoint into an engine or a module: what goes where, and this rank's ranges of each tensor.

It makes no difference how the tensors were cut when they were saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from zero.checkpoint.differences import Ask, Match, TargetParameter, compare, stateless
from zero.checkpoint.index import Damaged, Index, SavedParameter
from zero.checkpoint.reader import SLICE, Reader
from zero.checkpoint.safe_file import DTYPES, NAMES, dtype_name
from zero.core.agree import agree, if_different
from zero.core.comm import Axis
from zero.core.quantized_params import load_quant_state, quant_params
from zero.core.unit import Unit
from zero.engine.checkpoint.saved_state import saved_buffers
from zero.kernels.moments import Moment
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.shard_optimizer import Group
from zero.plan.cut import Cut
from zero.plan.formats import BLOCK
from zero.plan.layout import Fragment

T = TypeVar("T")

# What one rank raises as it is; of other exceptions it says the kind, too.
REFUSALS = (ValueError, OSError, RuntimeError, MemoryError)


class LoadPlan(NamedTuple):
    """A checkpoint that fits, and what is loaded from where."""

    place: Path
    index: Index
    match: Match
    ask: Ask


def together(work: Callable[[], T], axis: Axis, what: str) -> T:
    """What each rank's `work` gives; raises on all ranks where it fails on one. Collective; `what` is for errors."""
    result, problem = None, None
    try:
        result = work()
    except REFUSALS as error:
        problem = error
    except Exception as error:  # of a user's module, dataset or scheduler, say
        problem = ValueError(f"{what}: {type(error).__name__}: {error}")
        problem.__cause__ = error
    agree(problem, axis, what, (Damaged, ValueError))
    return result


def find_alike(look: Callable[[], LoadPlan | None], axis: Axis, what: str) -> LoadPlan | None:
    """What all ranks find alike; raises on all of them where one cannot load it, or finds another save."""
    plan = together(look, axis, what)
    save = None if plan is None else f"'{plan.index.tag}' saved as {plan.index.save}"
    found = agree([save, None if plan is None else str(plan.place)], axis)
    if len({save for save, _ in found}) > 1:
        each = "; ".join(f"rank {rank}: {save} in {at}" for rank, (save, at) in zip(axis.ranks, found, strict=True))
        raise ValueError(f"{what}: the ranks would load different checkpoints: {each}")
    return plan


class UnitLoader:
    """Takes what a checkpoint says of this rank's shards; talks to nobody, so full copies are outdated afterwards.

    Of a unit whose memory stays where it is the reader has only been asked, and the caller finishes: readers of many
    units wait for each other less often than those of each one.
    """

    def __init__(self, reader: Reader, plan: LoadPlan, optimizer: ZeroOptimizer | None) -> None:
        self._reader = reader
        self._index = plan.index
        self._names = plan.match.names
        self._ask = plan.ask
        self._optimizer = optimizer

    def load(self, unit: Unit, anew: bool) -> None:
        """Load one; `anew`: the optimizer begins anew with it."""
        states = self._ask.states and unit.shard.master is not None
        with unit.shard.acquired(changed=True):
            for part in unit.plan.layout.fragments(unit.shard.window):
                name = self._names.get(part.name)
                if name is None:
                    continue
                if self._ask.weights:
                    self._load_values(unit, name, part)
                if states:
                    self._load_moments(unit, name, part)
            if not unit.shard.placement.in_place:
                self._reader.finish()
                if self._ask.weights and unit.shard.master is not None:
                    unit.shard.publish()
        if states:
            # What the optimizer has of rows of matrices; what is not in the checkpoint begins anew.
            for name, first, _, values in self._optimizer.states.rows(unit, self._group(unit), True):
                source = self._names.get(name)
                stored = None if source is None else self._index.parameters[source].scales.get("rows")
                if stored is not None:
                    self._reader.fill(values, stored, first, f"rows of '{source}'")
            self._load_numbers(unit)
        elif anew and unit.shard.master is not None:
            self._restart(unit)

    def _load_values(self, unit: Unit, name: str, part: Fragment) -> None:
        reader, start, numel = self._reader, part.start, part.numel
        parameter, masters = self._index.parameters[name], self._ask.masters
        master, cut = unit.shard.master, _cut(unit, part)
        place = (unit.shard.values if master is None else master.shard).narrow(0, part.at, numel)
        if master is None:
            fill_plain(reader, name, place, start, masters, cut)
        elif _straight(unit, parameter, masters):
            reader.fill(place, parameter.weight, start, f"weight of '{name}'", cut)
            if parameter.master is not None:
                kept = master.tensor.narrow(0, part.at, numel)
                reader.fill(kept, parameter.master, start, f"master of '{name}'", cut)
        else:
            for at, count in _slices(numel):
                write = partial(_write, unit, part.at + at)
                reader.exact(name, start + at, count, write, masters, cut)

    def _load_moments(self, unit: Unit, name: str, part: Fragment) -> None:
        reader, rule, group = self._reader, self._optimizer.states, self._group(unit)
        parameter, cut = self._index.parameters[name], _cut(unit, part)
        if stateless(parameter):
            rule.restart(unit, group, part)
            return
        for key, (moment, signed) in rule.kept(unit, group, part, make=parameter.moments).items():
            stored, what = parameter.moments[key], f"{key} of '{name}'"
            if stored.dtype == "uint8" and rule.foreseen and self._index.signed[key] != signed:
                raise ValueError(f"{what}: the index says that it {'cannot' if signed else 'can'} be negative")
            if DTYPES[stored.dtype] == moment.values.dtype and bool(self._index.signed.get(key, True)) == signed:
                reader.fill(moment.values[: part.numel], stored, part.start, what, cut)
                if moment.scales is not None:
                    place = moment.scales[: -(-part.numel // BLOCK)]
                    in_blocks = None if cut is None else cut.in_blocks(BLOCK)
                    reader.fill(place, parameter.scales[key], part.start // BLOCK, f"scales of {what}", in_blocks)
                continue
            for at, count in _slices(part.numel):
                last = at + count == part.numel
                target = moment.narrow(at, (moment.numel if last else at + count) - at)
                reader.moment(name, key, part.start + at, count, partial(_round, target, signed), cut)

    def _load_numbers(self, unit: Unit) -> None:
        rule, group = self._optimizer.states, self._group(unit)
        names = [self._names[spec.name] for spec in unit.plan.params if spec.name in self._names]
        parameters = [self._index.parameters[name] for name in names]
        trained = [parameter for parameter in parameters if not stateless(parameter)]
        if not trained:
            if len(parameters) == len(unit.plan.params):
                self._restart(unit)
            return
        # Not all of torch's classes count steps, and those of ours that begin with the first one must know of them.
        steps = int((self._index.shared or {}).get("global_steps", 1))
        counted = {"step": max(1, steps), **trained[0].numbers}
        for key in rule.keys(unit, group)[1]:
            rule.set_number(unit, group, key, counted[key])

    def _restart(self, unit: Unit) -> None:
        with unit.shard.acquired(changed=True):
            self._optimizer.states.restart(unit, self._group(unit))

    def _group(self, unit: Unit) -> Group:
        return self._optimizer.param_groups[unit.plan.group]


def _cut(unit: Unit, part: Fragment) -> Cut | None:
    return next(spec.cut for spec in unit.plan.params if spec.name == part.name)


def _straight(unit: Unit, parameter: SavedParameter, masters: bool) -> bool:
    """Whether weight and master of a trained parameter come as they lie in the files: no rank rounds or converts."""
    master = unit.shard.master
    if NAMES[unit.shard.values.dtype] != parameter.weight.dtype:
        return False
    if master.tensor is master.shard:
        return parameter.master is None
    return masters and parameter.master is not None and parameter.master.dtype == NAMES[master.tensor.dtype]


def fill_plain(
    reader: Reader, name: str, place: torch.Tensor, start: int, masters: bool = True, cut: Cut | None = None
) -> None:
    """Fill `place` [n], contiguous, of any dtype and on any device, with the values from element `start` on."""
    parameter = reader.index.parameters[name]
    if NAMES[place.dtype] == parameter.weight.dtype:
        reader.fill(place, parameter.weight, start, f"weight of '{name}'", cut)
        return
    for at, count in _slices(place.numel()):
        reader.exact(name, start + at, count, place.narrow(0, at, count).copy_, masters, cut)


def _write(unit: Unit, at: int, values: torch.Tensor) -> None:
    unit.shard.master.write(at, values.float().to(unit.shard.placement.update_device))


def _round(target: Moment, signed: bool, values: torch.Tensor) -> None:
    """Write a state that was kept in another way to `target`, which may have padding behind it."""
    padded = target.values.new_zeros(target.numel, dtype=torch.float32)
    padded[: values.numel()] = values.to(padded.device)
    target.write(padded, signed)


def _slices(numel: int) -> Iterator[tuple[int, int]]:
    for at in range(0, numel, SLICE):
        yield at, min(SLICE, numel - at)


def _unequal(reader: Reader, match: Match, part: Fragment, masters: bool) -> list[str]:
    """What says that a parameter here is several in the checkpoint that are not equal in this part."""
    name, unequal = match.names.get(part.name), []
    for other in match.doubles.get(part.name, ()):
        for at, count in _slices(part.numel):
            both: list[torch.Tensor] = []
            for each in (name, other):
                reader.exact(each, part.start + at, count, both.append, masters)
            reader.finish()
            if not torch.equal(both[0].view(torch.uint8), both[1].view(torch.uint8)):
                unequal.append(other)
                break
    return [
        f"'{part.name}' is tied here; '{name}' and '{other}' of the checkpoint have other values" for other in unequal
    ]


def fit(
    place: Path,
    index: Index,
    ask: Ask,
    wanted: Iterable[TargetParameter],
    module: nn.Module,
    parts: Iterable[Fragment],
    taker: str,
) -> LoadPlan:
    """What of a checkpoint goes where. Raises ValueError, with all differences, where `taker` cannot take it.

    parts: what this rank holds of its parameters.
    """
    buffers = {name: (tuple(value.shape), dtype_name(value.dtype)) for name, value in saved_buffers(module).items()}
    # What says of 4-bit weights how they were made is text, and as long as its numbers.
    packed = quant_params(module)
    stored = {name: (each.shape, each.dtype) for name, each in index.buffers.items() if name in packed}
    match = compare(index, wanted, buffers | stored, ask)
    problem = match.problem(ask)
    if problem is None and match.doubles:
        with Reader(place, index) as reader:
            problem = "\n  ".join(line for part in parts for line in _unequal(reader, match, part, ask.masters))
    if problem:
        raise ValueError(f"{place} does not fit this {taker}:\n  {problem}")
    return LoadPlan(place, index, match, ask)


def names_elsewhere(module: nn.Module, axis: Axis) -> set[str]:
    """The names of parameters and buffers that other ranks along the axis have, and this one has not; collective."""
    own = [*module.state_dict(keep_vars=True)]
    return {name for names in if_different(own, axis) or () for name in names} - {*own}


def names_of_parameters(module: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id."""
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def load_buffers(reader: Reader, module: nn.Module, names: Iterable[str], own: Mapping[str, str]) -> None:
    """Take these buffers whole: rank 0's, or the tensor that `own` names for one that this rank had otherwise."""
    buffers, index, others = saved_buffers(module), reader.index, {}
    live = {id(value) for value in module.buffers()}
    for name in names:
        stored = index.tensors[own[name]] if name in own else index.buffers[name]
        value = reader.whole(stored, f"buffer '{name}'")
        if id(buffers[name]) in live:
            buffers[name].copy_(value)
        else:
            others[name] = value
    if others:  # by modules, for each state_dict, and only they know what it is
        module.load_state_dict(load_quant_state(module, others), strict=False)
