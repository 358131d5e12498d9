"""A checkpoint into an engine: this rank's ranges of each tensor, whoever cut them how when they were saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from zero.checkpoint.exact import exact, fetch
from zero.checkpoint.index import Index, Parameter, Stored
from zero.checkpoint.safe_file import NAMES, read
from zero.core.master import rounded
from zero.core.unit import Unit
from zero.kernels.moments import Moment
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.rules import Kept
from zero.plan.formats import BLOCK
from zero.plan.layout import Fragment, round_up


class Source:
    """The tensors of one checkpoint folder, range by range, on the CPU."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index

    def read(self, stored: Stored, start: int, numel: int, what: str) -> torch.Tensor:
        """Elements [start, start + numel), [numel] in the stored dtype."""
        return fetch(self.folder, stored, start, numel, what)

    def fill(self, out: torch.Tensor, stored: Stored, start: int, what: str) -> None:
        """Fill `out` [n], contiguous and of the stored dtype, on any device, with the elements from `start` on."""
        if out.device.type == "cpu":
            read(self.folder, stored, start, out, what)
        else:
            out.copy_(self.read(stored, start, out.numel(), what))

    def whole(self, stored: Stored, what: str) -> torch.Tensor:
        """All of it, in its shape."""
        return self.read(stored, 0, stored.numel, what).view(stored.shape)

    def exact(self, name: str, parameter: Parameter, start: int, numel: int, masters: bool = True) -> torch.Tensor:
        """The exact values of a parameter, fp32 [numel] (of one in fp64 or of integers: in its dtype).

        `masters`: those of the optimizer, where they are there, and not what the model computed with.
        """
        return exact(self.folder, name, parameter, start, numel, masters)

    def moment(self, name: str, parameter: Parameter, key: str, start: int, numel: int) -> Kept:
        """State `key` of elements [start, start + numel), as it was kept; in 8 bit of whole blocks around them."""
        stored, signed = parameter.moments[key], bool(self.index.signed.get(key, True))
        if stored.dtype != "uint8":
            return Kept(Moment(self.read(stored, start, numel, f"{key} of '{name}'")), signed)
        first = start // BLOCK * BLOCK
        stop = min(round_up(start + numel, BLOCK), stored.numel)
        codes = self.read(stored, first, stop - first, f"{key} of '{name}'")
        blocks = -(-(stop - first) // BLOCK)
        scales = self.read(parameter.scales[key], first // BLOCK, blocks, f"scales of {key} of '{name}'")
        return Kept(Moment(codes, scales), signed)


def load_unit(
    unit: Unit,
    optimizer: ZeroOptimizer | None,
    source: Source,
    names: Mapping[str, str],
    states: bool,
    masters: bool,
) -> None:
    """Take what the checkpoint says of this rank's shard; talks to nobody, so full copies are outdated afterwards.

    names: the unit's parameters that are to be loaded -> what the checkpoint calls them. states: also the optimizer's
    moments and numbers. masters: exact values from masters, not from what the model computed with.
    """
    with unit.borrow(written=True):
        for part in unit.plan.layout.fragments(unit.window):
            if part.name not in names:
                continue
            name = names[part.name]
            parameter = source.index.parameters[name]
            _load_values(unit, source, name, parameter, part, masters)
            if states and unit.master is not None:
                _load_moments(unit, optimizer, source, name, parameter, part)
    if states and unit.master is not None:
        found = [source.index.parameters[names[spec.name]] for spec in unit.plan.params if spec.name in names]
        _load_numbers(unit, optimizer, found)


def _load_values(unit: Unit, source: Source, name: str, parameter: Parameter, part: Fragment, masters: bool) -> None:
    start, numel = part.start, part.numel
    master = unit.master
    if master is None:
        place = unit.shard.narrow(0, part.at, numel)
        values = source.exact(name, parameter, start, numel, masters)
        place.copy_(rounded(values, place.dtype) if values.dtype == torch.float32 else values)
        return
    place, kept = master.shard.narrow(0, part.at, numel), master.tensor.narrow(0, part.at, numel)
    alike = NAMES[place.dtype] == parameter.weight.dtype and masters
    if alike and master.tensor is master.shard and parameter.master is None:
        source.fill(place, parameter.weight, start, f"weight of '{name}'")
    elif alike and parameter.master is not None and parameter.master.dtype == NAMES[kept.dtype]:
        source.fill(place, parameter.weight, start, f"weight of '{name}'")
        source.fill(kept, parameter.master, start, f"master of '{name}'")
    else:
        values = source.exact(name, parameter, start, numel, masters).float()
        master.write(part.at, values.to(kept.device))
    unit.push(part.at, numel)


def _load_moments(
    unit: Unit, optimizer: ZeroOptimizer, source: Source, name: str, parameter: Parameter, part: Fragment
) -> None:
    group = optimizer.param_groups[unit.plan.group]
    kept = optimizer.rule.kept(unit, group, part, make=bool(parameter.moments))
    for key, (moment, signed) in kept.items():
        found = source.moment(name, parameter, key, part.start, part.numel)
        if found.moment.format == moment.format and found.signed == signed:
            moment.values[: found.moment.numel].copy_(found.moment.values)
            if moment.scales is not None:
                moment.scales[: found.moment.scales.numel()].copy_(found.moment.scales)
            continue
        first = part.start - part.start // BLOCK * BLOCK if found.moment.scales is not None else 0
        values = found.moment.decode(found.signed)[first : first + part.numel]
        padded = moment.values.new_zeros(moment.numel, dtype=torch.float32)
        padded[: part.numel] = values.to(padded.device)
        moment.write(padded, signed)


def _load_numbers(unit: Unit, optimizer: ZeroOptimizer, found: Iterable[Parameter]) -> None:
    group = optimizer.param_groups[unit.plan.group]
    numbers: dict[str, float] = {}
    for parameter in found:
        numbers.update(parameter.numbers)
    for key, value in numbers.items():
        optimizer.rule.set_number(unit, group, key, value)


def renew(units: Iterable[Unit]) -> None:
    """Bring what was loaded to all who keep it whole; collective."""
    for unit in units:
        if not unit.cut or unit.whole:
            unit.gather()
            unit.wait()
