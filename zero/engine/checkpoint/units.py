"""A checkpoint into an engine: this rank's ranges of each tensor, whoever cut them how when they were saved.

Of parameters that every rank keeps whole, the other ranks' shards are read, too, where they would send them on one
host: a file that one rank reads is in the page cache for all, and a message would be copied more often.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from zero.checkpoint.differences import Ask, Match, Wanted, compare, stateless
from zero.checkpoint.index import Index, Parameter
from zero.checkpoint.reader import SLICE, Reader
from zero.checkpoint.safe_file import DTYPES, NAMES, dtype_name
from zero.core.quantized import load_beside, names_beside
from zero.core.unit import Unit
from zero.engine.checkpoint.collective_read import LoadPlan
from zero.engine.checkpoint.save_plan import saved_buffers
from zero.kernels.moments import Moment
from zero.optim.optimizer import ZeroOptimizer
from zero.plan.cut import Cut
from zero.plan.formats import BLOCK
from zero.plan.layout import Fragment, Span


def load_unit(unit: Unit, optimizer: ZeroOptimizer | None, reader: Reader, plan: LoadPlan, whole: bool) -> None:
    """Take what the checkpoint says of this rank's shard; talks to nobody, so full copies are outdated afterwards.

    Of a unit whose memory stays where it is the reader has only been asked, and the caller finishes: readers of many
    units wait for each other less often than those of each one. `whole`: of the other ranks' shards, too.
    """
    match, ask = plan.match, plan.ask
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
        if whole:
            _load_others(unit, reader, plan)
        if not unit.placement.in_place:
            reader.finish()
            if ask.weights and unit.master is not None:
                unit.masters.publish()
    if states:
        _load_rows(unit, optimizer, reader, match.names)
        names = [match.names[spec.name] for spec in unit.plan.params if spec.name in match.names]
        _load_numbers(unit, optimizer, reader.index, names)


def _load_others(unit: Unit, reader: Reader, plan: LoadPlan) -> None:
    """Ask for the full buffer of a unit but for the own shard; the unit is borrowed, and the caller finishes."""
    own, layout, cuts = unit.window, unit.plan.layout, _cuts(unit)
    for window in (Span(0, own.start), Span(own.stop, layout.numel - own.stop)):
        for part in layout.fragments(window):
            name = plan.match.names[part.name]
            place = unit.full.narrow(0, window.start + part.at, part.numel)
            reader.fill(place, plan.index.parameters[name].weight, part.start, f"weight of '{name}'", cuts[part.name])


def replaced(units: Iterable[Unit], plan: LoadPlan) -> list[Unit]:
    """The units whose other shards can be read as they will be; the same ones on all ranks."""
    if not plan.near or not plan.ask.weights:
        return []
    return [unit for unit in units if _replaced(unit, plan)]


def _replaced(unit: Unit, plan: LoadPlan) -> bool:
    if unit.cut or unit.mesh.shard.size == 1 or unit.full.device.type != "cpu":
        return False
    names = [plan.match.names.get(spec.name) for spec in unit.plan.params]
    # What is not in the checkpoint, or is rounded on its way, its owner has to tell.
    return all(name is not None and _straight(unit, plan.index.parameters[name], plan.ask.masters) for name in names)


def renew(units: Iterable[Unit], there: Collection[Unit]) -> None:
    """Bring what was loaded to all who keep it whole, but for units that are `there` already; collective."""
    kept = [unit for unit in units if unit.stays_full]
    for unit in kept:
        if unit in there:
            unit.complete()
        else:
            unit.gather()
    for unit in kept:
        unit.wait()


def restart(unit: Unit, optimizer: ZeroOptimizer) -> None:
    """Have the optimizer begin anew with a unit."""
    with unit.acquired(changed=True):
        optimizer.shard_optimizer.restart(unit, optimizer.param_groups[unit.plan.group])


def _load_values(unit: Unit, reader: Reader, name: str, part: Fragment, masters: bool) -> None:
    parameter, start, numel = reader.index.parameters[name], part.start, part.numel
    master, cut = unit.master, _cuts(unit)[part.name]
    shard = unit.shard if master is None else master.shard
    place = shard.narrow(0, part.at, numel)
    if master is None:
        fill_plain(reader, name, place, start, masters, cut)
        return
    if _straight(unit, parameter, masters):
        reader.fill(place, parameter.weight, start, f"weight of '{name}'", cut)
        if parameter.master is not None:
            kept = master.tensor.narrow(0, part.at, numel)
            reader.fill(kept, parameter.master, start, f"master of '{name}'", cut)
    else:
        for at, count in _slices(numel):
            write = partial(_write, unit, part.at + at)
            reader.exact(name, start + at, count, write, masters, cut)


def _cuts(unit: Unit) -> dict[str, Cut | None]:
    return {spec.name: spec.cut for spec in unit.plan.params}


def _straight(unit: Unit, parameter: Parameter, masters: bool) -> bool:
    """Whether weight and master of a parameter come as they lie in the files, so that no rank rounds or converts."""
    master = unit.master
    if NAMES[unit.shard.dtype] != parameter.weight.dtype:
        return False
    if master is None:
        return True
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
    unit.master.write(at, values.float().to(unit.placement.update_device))


def _load_moments(unit: Unit, optimizer: ZeroOptimizer, reader: Reader, name: str, part: Fragment) -> None:
    group = optimizer.param_groups[unit.plan.group]
    parameter, cut = reader.index.parameters[name], _cuts(unit)[part.name]
    if stateless(parameter):
        optimizer.shard_optimizer.restart(unit, group, part)
        return
    for key, (moment, signed) in optimizer.shard_optimizer.kept(unit, group, part, make=parameter.moments).items():
        stored, scales = parameter.moments[key], parameter.scales.get(key)
        if DTYPES[stored.dtype] == moment.values.dtype and bool(reader.index.signed.get(key, True)) == signed:
            reader.fill(moment.values[: part.numel], stored, part.start, f"{key} of '{name}'", cut)
            if moment.scales is not None:
                place = moment.scales[: -(-part.numel // BLOCK)]
                in_blocks = None if cut is None else cut.in_blocks(BLOCK)
                reader.fill(place, scales, part.start // BLOCK, f"scales of {key} of '{name}'", in_blocks)
            continue
        for at, count in _slices(part.numel):
            last = at + count == part.numel
            target = moment.narrow(at, (moment.numel if last else at + count) - at)
            reader.moment(name, key, part.start + at, count, partial(_round, target, signed), cut)


def _load_rows(unit: Unit, optimizer: ZeroOptimizer, reader: Reader, names: Mapping[str, str]) -> None:
    """Take what the optimizer has of rows of matrices; what is not in the checkpoint begins anew."""
    for name, first, _, values in optimizer.shard_optimizer.rows(unit, optimizer.param_groups[unit.plan.group], True):
        stored = reader.index.parameters[names[name]].scales.get("rows") if name in names else None
        if stored is not None:
            reader.fill(values, stored, first, f"rows of '{name}'")


def _round(target: Moment, signed: bool, values: torch.Tensor) -> None:
    """Write a state that was kept in another way to `target`, which may have padding behind it."""
    padded = target.values.new_zeros(target.numel, dtype=torch.float32)
    padded[: values.numel()] = values.to(padded.device)
    target.write(padded, signed)


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
    for key in rule.keys(unit, group)[1]:
        rule.set_number(unit, group, key, counted[key])


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
    wanted: Iterable[Wanted],
    module: nn.Module,
    parts: Iterable[Fragment],
    taker: str,
) -> LoadPlan:
    """What of a checkpoint goes where. Raises ValueError, with all differences, where `taker` cannot take it.

    parts: what this rank holds of its parameters.
    """
    buffers = {name: (tuple(value.shape), dtype_name(value.dtype)) for name, value in saved_buffers(module).items()}
    # What says of 4-bit weights how they were made is text, and as long as its numbers.
    packed = names_beside(module)
    stored = {name: (each.shape, each.dtype) for name, each in index.buffers.items() if name in packed}
    match = compare(index, wanted, buffers | stored, ask)
    problem = match.problem(ask)
    if problem is None and match.doubles:
        with Reader(place, index) as reader:
            problem = "\n  ".join(line for part in parts for line in _unequal(reader, match, part, ask.masters))
    if problem:
        raise ValueError(f"{place} does not fit this {taker}:\n  {problem}")
    return LoadPlan(place, index, match, ask)


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
        module.load_state_dict(load_beside(module, others), strict=False)
