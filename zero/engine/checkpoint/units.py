"""A checkpoint into an engine: this rank's ranges of each tensor, whoever cut them how when they were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zero.checkpoint.differences import Ask, Match, stateless
from zero.checkpoint.exact import made, made_of
from zero.checkpoint.index import Index, Parameter, Stored
from zero.checkpoint.reader import Reader
from zero.checkpoint.safe_file import DTYPES, NAMES, dtype_name
from zero.core.unit import Unit
from zero.engine.checkpoint.chunks import saved_buffers
from zero.kernels.moments import Moment
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.shard_optimizer import Kept, ShardOptimizer
from zero.plan.formats import BLOCK
from zero.plan.layout import Fragment, round_up

# Elements that are converted, or copied to another device, at a time. A multiple of BLOCK.
SLICE = 1 << 22


class Source:
    """The tensors of one checkpoint folder, range by range, on the CPU; to be closed.

    What has a `then` is collected, read in `finish`, and handed over there.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.index = index
        self._reader = Reader(folder)

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def finish(self) -> None:
        """Read what was asked for; raises Damaged."""
        self._reader.finish()

    def whole(self, stored: Stored, what: str) -> torch.Tensor:
        """All of it, in its shape, at once."""
        out = torch.empty(stored.numel, dtype=DTYPES[stored.dtype])
        self._reader.ask(stored, 0, out, what)
        self.finish()
        return out.view(stored.shape)

    def fill(self, out: torch.Tensor, stored: Stored, start: int, what: str) -> None:
        """Fill `out` [n], contiguous and of the stored dtype, on any device, with the elements from `start` on."""
        if out.device.type == "cpu":
            self._reader.ask(stored, start, out, what)
            return
        for begin in range(0, out.numel(), SLICE):
            place = out[begin : begin + SLICE]
            self._read(stored, start + begin, place.numel(), what, place.copy_)

    def exact(
        self,
        name: str,
        start: int,
        numel: int,
        then: Callable[[torch.Tensor], Any],
        masters: bool = True,
    ) -> None:
        """The exact values of a parameter, fp32 [numel] (of one in fp64 or of integers: in its dtype).

        `masters`: those of the optimizer, where they are there, and not what the model computed with.
        """
        wanted, found = made_of(name, self.index.parameters[name], masters), []

        def came(values: torch.Tensor) -> None:
            found.append(values)
            if len(found) == len(wanted):
                then(made(found))

        for what, stored in wanted:
            self._read(stored, start, numel, what, came)

    def moment(self, name: str, key: str, start: int, numel: int, then: Callable[[Kept], Any]) -> None:
        """State `key` of elements [start, start + numel), as it was kept; in 8 bit of whole blocks around them."""
        parameter = self.index.parameters[name]
        stored, signed = parameter.moments[key], bool(self.index.signed.get(key, True))
        what = f"{key} of '{name}'"
        if stored.dtype != "uint8":
            self._read(stored, start, numel, what, lambda values: then(Kept(Moment(values), signed)))
            return
        first = start // BLOCK * BLOCK
        stop = min(round_up(start + numel, BLOCK), stored.numel)
        blocks = -(-(stop - first) // BLOCK)
        codes: list[torch.Tensor] = []
        self._read(stored, first, stop - first, what, codes.append)
        scales = parameter.scales[key]
        self._read(
            scales, first // BLOCK, blocks, f"scales of {what}", lambda last: then(Kept(Moment(codes[0], last), signed))
        )

    def _read(self, stored: Stored, start: int, numel: int, what: str, then: Callable[[torch.Tensor], Any]) -> None:
        out = torch.empty(numel, dtype=DTYPES[stored.dtype])
        self._reader.ask(stored, start, out, what, lambda: then(out))


def load_unit(
    unit: Unit,
    optimizer: ZeroOptimizer | None,
    source: Source,
    match: Match,
    ask: Ask,
    more: Callable[[Unit], None] | None = None,
) -> None:
    """Take what the checkpoint says of this rank's shard; talks to nobody, so full copies are outdated afterwards.

    Of a unit whose memory stays where it is the source has only been asked, and the caller finishes: readers of many
    units wait for each other less often than those of each one.
    more: asks the source for what else is to be read along with it.
    """
    states = ask.states and unit.master is not None
    with unit.acquired(changed=True):
        for part in unit.plan.layout.fragments(unit.window):
            name = match.names.get(part.name)
            if name is None:
                continue
            if ask.weights:
                _load_values(unit, source, name, part, ask.masters)
            if states:
                _load_moments(unit, optimizer, source, name, part)
        if more is not None:
            more(unit)
        if not unit.placement.in_place:
            source.finish()
            if ask.weights and unit.master is not None:
                unit.masters.publish()
    if states:
        names = [match.names[spec.name] for spec in unit.plan.params if spec.name in match.names]
        _load_numbers(unit, optimizer, source.index, names)


def restart(unit: Unit, optimizer: ZeroOptimizer) -> None:
    """Have the optimizer begin anew with a unit."""
    with unit.acquired(changed=True):
        optimizer.rule.restart(unit, optimizer.param_groups[unit.plan.group])


def _load_values(unit: Unit, source: Source, name: str, part: Fragment, masters: bool) -> None:
    parameter, start, numel = source.index.parameters[name], part.start, part.numel
    master = unit.master
    shard = unit.shard if master is None else master.shard
    place = shard.narrow(0, part.at, numel)
    if master is None:
        fill_plain(source, name, place, start, masters)
        return
    if straight(unit, parameter, masters):
        source.fill(place, parameter.weight, start, f"weight of '{name}'")
        if parameter.master is not None:
            kept = master.tensor.narrow(0, part.at, numel)
            source.fill(kept, parameter.master, start, f"master of '{name}'")
    else:
        for at, count in _slices(numel):
            source.exact(name, start + at, count, _writer(unit, part.at + at), masters)


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


def fill_plain(source: Source, name: str, place: torch.Tensor, start: int, masters: bool = True) -> None:
    """Fill `place` [n], contiguous, of any dtype and on any device, with the values from element `start` on."""
    parameter = source.index.parameters[name]
    if NAMES[place.dtype] == parameter.weight.dtype:
        source.fill(place, parameter.weight, start, f"weight of '{name}'")
        return
    for at, count in _slices(place.numel()):
        source.exact(name, start + at, count, place.narrow(0, at, count).copy_, masters)


def _writer(unit: Unit, at: int) -> Callable[[torch.Tensor], None]:
    """Writes exact values from element `at` of the shard on."""
    return lambda values: unit.master.write(at, values.float().to(unit.placement.update_device))


def _load_moments(unit: Unit, optimizer: ZeroOptimizer, source: Source, name: str, part: Fragment) -> None:
    group = optimizer.param_groups[unit.plan.group]
    parameter = source.index.parameters[name]
    if stateless(parameter):
        optimizer.rule.restart(unit, group, part)
        return
    for key, (moment, signed) in optimizer.rule.kept(unit, group, part, make=parameter.moments).items():
        stored, scales = parameter.moments[key], parameter.scales.get(key)
        if DTYPES[stored.dtype] == moment.values.dtype and bool(source.index.signed.get(key, True)) == signed:
            source.fill(moment.values[: part.numel], stored, part.start, f"{key} of '{name}'")
            if moment.scales is not None:
                place = moment.scales[: -(-part.numel // BLOCK)]
                source.fill(place, scales, part.start // BLOCK, f"scales of {key} of '{name}'")
            continue
        for at, count in _slices(part.numel):
            last = at + count == part.numel
            target = moment.narrow(at, (moment.numel if last else at + count) - at)
            source.moment(name, key, part.start + at, count, _rounder(target, signed, part.start + at, count))


def _rounder(target: Moment, signed: bool, start: int, numel: int) -> Callable[[Kept], None]:
    """Writes elements [start, start + numel) of a state that was kept in another way to `target`."""

    def write(found: Kept) -> None:
        first = start % BLOCK if found.moment.scales is not None else 0
        values = target.values.new_zeros(target.numel, dtype=torch.float32)
        values[:numel] = found.moment.decode(found.signed)[first : first + numel].to(values.device)
        target.write(values, signed)

    return write


def _load_numbers(unit: Unit, optimizer: ZeroOptimizer, index: Index, names: Iterable[str]) -> None:
    rule, group = optimizer.rule, optimizer.param_groups[unit.plan.group]
    found = [index.parameters[name] for name in names]
    trained = [parameter for parameter in found if not stateless(parameter)]
    if not trained:
        if len(found) == len(unit.plan.params):
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


def doubled(source: Source, match: Match, ask: Ask, part: Fragment, states: bool) -> list[str]:
    """What says that a parameter here is several in the checkpoint that are not equal in this part.

    `states`: those of the optimizer must be equal, too.
    """
    lines = []
    for other in match.doubles.get(part.name, ()):
        name = match.names[part.name]
        if not _equal(source, name, other, part, ask.masters):
            lines.append(f"'{part.name}' is tied here; '{name}' and '{other}' of the checkpoint have other values")
        elif states and not _equal_states(source, name, other, part):
            lines.append(
                f"'{part.name}' is tied here; the states of the optimizer for '{name}' and '{other}' are not equal; "
                "load_optimizer_states=False loads the weights, and the optimizer begins anew"
            )
    return lines


def _equal(source: Source, name: str, other: str, part: Fragment, masters: bool) -> bool:
    for at, count in _slices(part.numel):
        both: list[torch.Tensor] = []
        for each in (name, other):
            source.exact(each, part.start + at, count, both.append, masters)
        source.finish()
        if not torch.equal(both[0].view(torch.uint8), both[1].view(torch.uint8)):
            return False
    return True


def _equal_states(source: Source, name: str, other: str, part: Fragment) -> bool:
    states = [source.index.parameters[each].moments for each in (name, other)]
    if states[0].keys() != states[1].keys():
        return False
    for key in states[0]:
        for at, count in _slices(part.numel):
            both: list[Kept] = []
            for each in (name, other):
                source.moment(each, key, part.start + at, count, both.append)
            source.finish()
            if not torch.equal(*(kept.moment.decode(kept.signed) for kept in both)):
                return False
    return True


def names_of_parameters(module: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id."""
    found: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(name)
    return found


def shapes_of_buffers(module: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each buffer of a state_dict."""
    return {name: (tuple(value.shape), dtype_name(value.dtype)) for name, value in saved_buffers(module).items()}


def load_buffers(source: Source, module: nn.Module, names: Iterable[str], own: Mapping[str, str]) -> None:
    """Take these buffers whole: rank 0's, or the tensor that `own` names for one that this rank had otherwise."""
    buffers, index, made = saved_buffers(module), source.index, {}
    live = {id(value) for value in module.buffers()}
    for name in names:
        stored = index.tensors[own[name]] if name in own else index.buffers[name]
        value = source.whole(stored, f"buffer '{name}'")
        if id(buffers[name]) in live:
            buffers[name].copy_(value)
        else:
            made[name] = value
    if made:  # by modules, for each state_dict, and only they know what it is
        module.load_state_dict(made, strict=False)
