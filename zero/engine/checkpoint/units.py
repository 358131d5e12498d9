"""A checkpoint into an engine: this rank's ranges of each tensor, whoever cut them how when they were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.checkpoint.differences import Ask, Match, Wanted, compare, stateless
from zero.checkpoint.index import Index, Parameter
from zero.checkpoint.reader import SLICE, Reader, SavedMoment
from zero.checkpoint.safe_file import DTYPES, NAMES, dtype_name
from zero.core.unit import Unit
from zero.engine.checkpoint.chunks import saved_buffers
from zero.engine.checkpoint.collective_read import LoadPlan
from zero.kernels.moments import Moment
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.shard_optimizer import ShardOptimizer
from zero.plan.formats import BLOCK
from zero.plan.layout import Fragment


def load_unit(
    unit: Unit,
    optimizer: ZeroOptimizer | None,
    reader: Reader,
    match: Match,
    ask: Ask,
    more: Callable[[Unit], None] | None = None,
) -> None:
    """Take what the checkpoint says of this rank's shard; talks to nobody, so full copies are outdated afterwards.

    Of a unit whose memory stays where it is the reader has only been asked, and the caller finishes: readers of many
    units wait for each other less often than those of each one.
    more: asks the reader for what else is to be read along with it.
    """
    states = ask.states and unit.master is not None
    with unit.acquired(changed=True):
        for part in unit.plan.layout.fragments(unit.window):
            name = match.names.get(part.name)
            if name is None:
                continue
            if ask.weights:
                _load_values(unit, reader, name, part, ask.masters)
            if states:
                _load_moments(unit, optimizer, reader, name, part)
        if more is not None:
            more(unit)
        if not unit.placement.in_place:
            reader.finish()
            if ask.weights and unit.master is not None:
                unit.masters.publish()
    if states:
        names = [match.names[spec.name] for spec in unit.plan.params if spec.name in match.names]
        _load_numbers(unit, optimizer, reader.index, names)


def restart(unit: Unit, optimizer: ZeroOptimizer) -> None:
    """Have the optimizer begin anew with a unit."""
    with unit.acquired(changed=True):
        optimizer.shard_optimizer.restart(unit, optimizer.param_groups[unit.plan.group])


def _load_values(unit: Unit, reader: Reader, name: str, part: Fragment, masters: bool) -> None:
    parameter, start, numel = reader.index.parameters[name], part.start, part.numel
    master = unit.master
    shard = unit.shard if master is None else master.shard
    place = shard.narrow(0, part.at, numel)
    if master is None:
        fill_plain(reader, name, place, start, masters)
        return
    if straight(unit, parameter, masters):
        reader.fill(place, parameter.weight, start, f"weight of '{name}'")
        if parameter.master is not None:
            kept = master.tensor.narrow(0, part.at, numel)
            reader.fill(kept, parameter.master, start, f"master of '{name}'")
    else:
        for at, count in _slices(numel):
            reader.exact(name, start + at, count, _writer(unit, part.at + at), masters)


def straight(unit: Unit, parameter: Parameter, masters: bool) -> bool:
    """Whether weight and master of a parameter come as they lie in the files, so that no rank rounds or converts."""
    master = unit.master
    if NAMES[unit.shard.dtype] != parameter.weight.dtype:
        return False
    if master is None:
        return True
    if master.tensor is master.shard:
        return parameter.master is None
    return masters and parameter.master is not None and parameter.master.dtype == NAMES[master.tensor.dtype]


def fill_plain(reader: Reader, name: str, place: torch.Tensor, start: int, masters: bool = True) -> None:
    """Fill `place` [n], contiguous, of any dtype and on any device, with the values from element `start` on."""
    parameter = reader.index.parameters[name]
    if NAMES[place.dtype] == parameter.weight.dtype:
        reader.fill(place, parameter.weight, start, f"weight of '{name}'")
        return
    for at, count in _slices(place.numel()):
        reader.exact(name, start + at, count, place.narrow(0, at, count).copy_, masters)


def _writer(unit: Unit, at: int) -> Callable[[torch.Tensor], None]:
    """Writes exact values from element `at` of the shard on."""
    return lambda values: unit.master.write(at, values.float().to(unit.placement.update_device))


def _load_moments(unit: Unit, optimizer: ZeroOptimizer, reader: Reader, name: str, part: Fragment) -> None:
    group = optimizer.param_groups[unit.plan.group]
    parameter = reader.index.parameters[name]
    if stateless(parameter):
        optimizer.shard_optimizer.restart(unit, group, part)
        return
    for key, (moment, signed) in optimizer.shard_optimizer.kept(unit, group, part, make=parameter.moments).items():
        stored, scales = parameter.moments[key], parameter.scales.get(key)
        if DTYPES[stored.dtype] == moment.values.dtype and bool(reader.index.signed.get(key, True)) == signed:
            reader.fill(moment.values[: part.numel], stored, part.start, f"{key} of '{name}'")
            if moment.scales is not None:
                place = moment.scales[: -(-part.numel // BLOCK)]
                reader.fill(place, scales, part.start // BLOCK, f"scales of {key} of '{name}'")
            continue
        for at, count in _slices(part.numel):
            last = at + count == part.numel
            target = moment.narrow(at, (moment.numel if last else at + count) - at)
            reader.moment(name, key, part.start + at, count, _rounder(target, signed, part.start + at, count))


def _rounder(target: Moment, signed: bool, start: int, numel: int) -> Callable[[SavedMoment], None]:
    """Writes elements [start, start + numel) of a state that was kept in another way to `target`."""

    def write(saved: SavedMoment) -> None:
        first = start % BLOCK if saved.moment.scales is not None else 0
        values = target.values.new_zeros(target.numel, dtype=torch.float32)
        values[:numel] = saved.decode()[first : first + numel].to(values.device)
        target.write(values, signed)

    return write


def _load_numbers(unit: Unit, optimizer: ZeroOptimizer, index: Index, names: Iterable[str]) -> None:
    rule, group = optimizer.shard_optimizer, optimizer.param_groups[unit.plan.group]
    parameters = [index.parameters[name] for name in names]
    trained = [parameter for parameter in parameters if not stateless(parameter)]
    if not trained:
        if len(parameters) == len(unit.plan.params):
            restart(unit, optimizer)
        return
    # Not all of torch's classes count steps, and those of ours that begin with the first one must know of them.
    counted = {"step": max(1, int((index.shared or {}).get("global_steps", 1))), **trained[0].numbers}
    _set_numbers(rule, unit, group, counted)


def _set_numbers(rule: ShardOptimizer, unit: Unit, group: dict[str, Any], numbers: dict[str, float]) -> None:
    for key in rule.keys(unit, group)[1]:
        rule.set_number(unit, group, key, numbers[key])


def _slices(numel: int) -> Iterator[tuple[int, int]]:
    for at in range(0, numel, SLICE):
        yield at, min(SLICE, numel - at)


def doubled(reader: Reader, match: Match, ask: Ask, part: Fragment, states: bool) -> list[str]:
    """What says that a parameter here is several in the checkpoint that are not equal in this part.

    `states`: those of the optimizer must be equal, too.
    """
    lines = []
    for other in match.doubles.get(part.name, ()):
        name = match.names[part.name]
        if not _equal(reader, name, other, part, ask.masters):
            lines.append(f"'{part.name}' is tied here; '{name}' and '{other}' of the checkpoint have other values")
        elif states and not _equal_states(reader, name, other, part):
            lines.append(
                f"'{part.name}' is tied here; the states of the optimizer for '{name}' and '{other}' are not equal; "
                "load_optimizer_states=False loads the weights, and the optimizer begins anew"
            )
    return lines


def _equal(reader: Reader, name: str, other: str, part: Fragment, masters: bool) -> bool:
    for at, count in _slices(part.numel):
        both: list[torch.Tensor] = []
        for each in (name, other):
            reader.exact(each, part.start + at, count, both.append, masters)
        reader.finish()
        if not torch.equal(both[0].view(torch.uint8), both[1].view(torch.uint8)):
            return False
    return True


def _equal_states(reader: Reader, name: str, other: str, part: Fragment) -> bool:
    states = [reader.index.parameters[each].moments for each in (name, other)]
    if states[0].keys() != states[1].keys():
        return False
    for key in states[0]:
        for at, count in _slices(part.numel):
            both: list[SavedMoment] = []
            for each in (name, other):
                reader.moment(each, key, part.start + at, count, both.append)
            reader.finish()
            if not torch.equal(*(saved.decode() for saved in both)):
                return False
    return True


def fit(
    place: Path,
    index: Index,
    ask: Ask,
    wanted: Iterable[Wanted],
    module: nn.Module,
    parts: Iterable[tuple[Fragment, bool]],
    taker: str,
) -> LoadPlan:
    """What of a checkpoint goes where. Raises ValueError, with all differences, where `taker` cannot take it.

    parts: what this rank holds of its parameters, and whether with state of the optimizer.
    """
    match = compare(index, wanted, shapes_of_buffers(module), ask)
    problem = match.problem(ask)
    if problem is None and match.doubles:
        with Reader(place, index) as reader:
            lines = [
                line for part, trained in parts for line in doubled(reader, match, ask, part, ask.states and trained)
            ]
        problem = "\n  ".join(lines)
    if problem:
        raise ValueError(f"{place} does not fit this {taker}:\n  {problem}")
    return LoadPlan(place, index, match, ask)


def names_of_parameters(module: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id."""
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def shapes_of_buffers(module: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each buffer of a state_dict."""
    return {name: (tuple(value.shape), dtype_name(value.dtype)) for name, value in saved_buffers(module).items()}


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
        module.load_state_dict(others, strict=False)
