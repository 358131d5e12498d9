"""The state of one fused pass: moments of each run of one format, and the number of steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch

from zero.core.unit import Unit
from zero.kernels.formulas import Formula
from zero.kernels.moments import Moment
from zero.optim.shard_optimizer import Group, Kept, ShardStates
from zero.plan.formats import Formats, Run, runs
from zero.plan.layout import Fragment, Span, round_up


class States(NamedTuple):
    """The optimizer state of one shard: the moments of each run of one format, and the number of steps."""

    names: tuple[str, ...]
    first: int  # of the shard in the unit's flat buffer, elements
    runs: tuple[tuple[Run, tuple[Moment, ...]], ...]
    steps: int

    @property
    def nbytes(self) -> int:
        """Bytes of all moments."""
        return sum(moment.nbytes for _, moments in self.runs for moment in moments)


class FusedStates(ShardStates):
    """The moments of all units, which exist before the first step where anybody asks.

    formula: gives that of a group, with its hyperparameters.
    """

    foreseen = True

    def __init__(self, formula: Callable[[Group], Formula], formats: Formats) -> None:
        self.formats = formats
        self._formula = formula
        self._states: dict[int, States] = {}

    def begin(self, unit: Unit, group: Group) -> None:
        self.of(unit, group)

    def of(self, unit: Unit, group: Group) -> States:
        """The unit's state; new, at step 0, before the first step, and when SGD's momentum is switched on or off."""
        formula = self._formula(group)
        known = self._states.get(unit.index)
        if known is None or known.names != formula.state_names:
            window = unit.shard.window
            value, device = float(group.get("initial_accumulator_value", 0.0)), unit.shard.placement.update_device
            kept = tuple(
                (run, tuple(Moment.filled(run.numel, run.format, value, device, signed) for signed in formula.signed))
                for run in runs(unit.plan, window, self.formats.moments)
            )
            self._states[unit.index] = known = States(formula.state_names, window.start, kept, 0)
            unit.shard.placement.state_store.put([tensor for _, _, tensor in self.tensors(unit)])
        return known

    def count(self, unit: Unit, steps: int) -> States:
        """Count so many steps more of a unit, whose state there is; returns the state."""
        known = self._states[unit.index]
        self._states[unit.index] = known = known._replace(steps=known.steps + steps)
        return known

    def nbytes(self, unit: Unit, group: Group) -> int:
        """See `ShardStates.nbytes`; before the first step, what the step will allocate."""
        formula = self._formula(group)
        known = self._states.get(unit.index)
        if known is not None and known.names == formula.state_names:
            return known.nbytes
        formats = self.formats._replace(states=len(formula.state_names))
        there = runs(unit.plan, unit.shard.window, formats.moments)
        return sum(formats.moments_nbytes(run.numel, run.format) for run in there)

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Span, torch.Tensor]]:
        """See `ShardStates.tensors`; codes of 8 bit are followed by their scales."""
        known = self._states.get(unit.index)
        for run, moments in known.runs if known else ():
            for name, moment in zip(known.names, moments, strict=True):
                span = Span(run.start, run.numel)
                yield name, span, moment.values
                if moment.scales is not None:
                    yield f"a scale of {name}", span, moment.scales

    def keys(self, unit: Unit, group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self._formula(group).state_names, ("step",)

    def number(self, unit: Unit, group: Group, key: str) -> float:
        _conclude(unit)
        return self.of(unit, group).steps

    def set_number(self, unit: Unit, group: Group, key: str, value: float) -> None:
        _conclude(unit)
        self._states[unit.index] = self.of(unit, group)._replace(steps=int(value))

    def read(self, unit: Unit, group: Group, key: str, part: Fragment) -> torch.Tensor:
        with unit.shard.acquired():
            moment, signed = self._moment(unit, group, key, part)
            return moment.decode(signed)[: part.numel].clone()

    def write(self, unit: Unit, group: Group, key: str, part: Fragment, values: torch.Tensor) -> None:
        with unit.shard.acquired(changed=True):
            moment, signed = self._moment(unit, group, key, part)
            padded = moment.values.new_zeros(moment.numel, dtype=torch.float32)
            padded[: part.numel] = values
            moment.write(padded, signed)

    def kept(self, unit: Unit, group: Group, part: Fragment, make: Collection[str] = ()) -> dict[str, Kept]:
        names = self._formula(group).state_names
        return {key: Kept(*self._moment(unit, group, key, part)) for key in names}

    def restart(self, unit: Unit, group: Group, part: Fragment | None = None) -> None:
        if part is None:
            states, signs = self.of(unit, group), self._formula(group).signed
            pairs = [pair for _, moments in states.runs for pair in zip(moments, signs, strict=True)]
            self.set_number(unit, group, "step", 0)
        else:
            pairs = list(self.kept(unit, group, part).values())
        for moment, signed in pairs:
            moment.fill(float(group.get("initial_accumulator_value", 0.0)), signed)

    def _moment(self, unit: Unit, group: Group, key: str, part: Fragment) -> tuple[Moment, bool]:
        """The state of a fragment, with the padding after it in its last block; and whether it has signs."""
        index = self._formula(group).state_names.index(key)
        for run, moments in self.of(unit, group).runs:
            if run.start <= part.at < run.start + run.numel:
                numel = round_up(part.numel, self.formats.alignment)
                start = part.at - run.start
                moment = moments[index].narrow(start, min(numel, run.numel - start))
                return moment, self._formula(group).signed[index]
        raise RuntimeError(f"unit '{unit.plan.name}' has no state for element {part.at} of its shard")

    def forget(self) -> None:
        self._states.clear()


def _conclude(unit: Unit) -> None:
    """Wait until the unit's number of steps is known."""
    unit.shard.settle()
    if (optimizer := unit.optimizer()) is not None:
        optimizer.conclude()
