"""Adam, AdamW, Lion, SGD and Adagrad on the shards of units, each in one fused pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from zero.config.check import optimizer_problems
from zero.config.optimizers import ARGUMENTS, ONLY_TORCH, Arguments, torch_reason
from zero.core.unit import Unit
from zero.kernels.formulas import FORMULAS, Formula, formats_of
from zero.kernels.moments import Moment
from zero.kernels.step import step as fused_step
from zero.optim.shard_optimizer import Group, Kept, ShardOptimizer
from zero.plan.formats import Run, runs
from zero.plan.layout import Fragment, Span, round_up

# Arguments that matter only before the first step and mean nothing in a parameter group.
_NOT_IN_GROUPS = ("zero", "amsgrad", "eps_inside_sqrt", "fp32_optimizer_states", *ONLY_TORCH)


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


class FusedShardOptimizer(ShardOptimizer):
    """Adam, AdamW, Lion, SGD and Adagrad, each in one fused pass over the shard (zero/kernels/step.py).

    `kind` is a key of ARGUMENTS, `params` its checked arguments, `compute_dtype` the dtype of the parameters.

    section: the JSON section that describes it.
    """

    factor_on_device = True
    foreseen = True
    marks_changes = True

    def __init__(self, kind: str, params: Arguments, compute_dtype: str) -> None:
        self._formula = FORMULAS[kind]
        self.section = {"type": kind, "params": params.model_dump(exclude_unset=True)}
        self.defaults = {key: value for key, value in params if key not in _NOT_IN_GROUPS}
        self.formats = formats_of(kind, params, compute_dtype)
        self._states: dict[int, States] = {}

    def check(self, group: Group) -> None:
        """See `ShardOptimizer.check`."""
        self._formula(group)

    def begin(self, unit: Unit, group: Group) -> None:
        """See `ShardOptimizer.begin`."""
        self.states(unit, group)

    def update(
        self, unit: Unit, grad: torch.Tensor, group: Group, factor: float | torch.Tensor, threads: int | None = None
    ) -> None:
        """One step of the formula on the unit's shard, with the hyperparameters of `group`; see `ShardOptimizer`."""
        states = self.states(unit, group)
        self._states[unit.index] = states = states._replace(steps=states.steps + 1)
        master, param = unit.shard.master.tensor, unit.shard.master.rounding
        marks = None if unit.shard.changes is None else unit.shard.changes.marks()
        for formula, run, moments in self._parts(unit, group, states):
            part = slice(run.start, run.start + run.numel)
            fused_step(
                formula,
                master[part],
                moments,
                grad[part],
                None if param is None else param[part],
                step=states.steps,
                grad_scale=factor,
                # Stochastic rounding derives its bits from unit, step and place in the unit, which all stages share.
                key=unit.index,
                first=0 if run.format == "fp32" else states.first + run.start,
                threads=threads,
                marks=None if marks is None else marks[run.start // 8 : -(-(run.start + run.numel) // 8)],
            )

    def _parts(self, unit: Unit, group: Group, states: States) -> Iterator[tuple[Formula, Run, tuple[Moment, ...]]]:
        """The parts of a step: formulas, each with its place in the shard, and the moments there."""
        formula = self._formula(group)
        return ((formula, *run) for run in states.runs)

    def take_back(self, units: Iterable[Unit]) -> None:
        """See `ShardOptimizer.take_back`."""
        for unit in units:
            states = self._states[unit.index]
            self._states[unit.index] = states._replace(steps=states.steps - 1)

    def states(self, unit: Unit, group: Group) -> States:
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

    def nbytes(self, unit: Unit, group: Group) -> int:
        """See `ShardOptimizer.nbytes`; before the first step, what the step will allocate."""
        formula = self._formula(group)
        known = self._states.get(unit.index)
        if known is not None and known.names == formula.state_names:
            return known.nbytes
        formats = self.formats._replace(states=len(formula.state_names))
        there = runs(unit.plan, unit.shard.window, formats.moments)
        return sum(formats.moments_nbytes(run.numel, run.format) for run in there)

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Span, torch.Tensor]]:
        """See `ShardOptimizer.tensors`; codes of 8 bit are followed by their scales."""
        known = self._states.get(unit.index)
        for run, moments in known.runs if known else ():
            for name, moment in zip(known.names, moments, strict=True):
                span = Span(run.start, run.numel)
                yield name, span, moment.values
                if moment.scales is not None:
                    yield f"a scale of {name}", span, moment.scales

    def keys(self, unit: Unit, group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See `ShardOptimizer.keys`."""
        return self._formula(group).state_names, ("step",)

    def number(self, unit: Unit, group: Group, key: str) -> float:
        """See `ShardOptimizer.number`."""
        _conclude(unit)
        return self.states(unit, group).steps

    def set_number(self, unit: Unit, group: Group, key: str, value: float) -> None:
        """See `ShardOptimizer.set_number`."""
        _conclude(unit)
        self._states[unit.index] = self.states(unit, group)._replace(steps=int(value))

    def read(self, unit: Unit, group: Group, key: str, part: Fragment) -> torch.Tensor:
        """See `ShardOptimizer.read`."""
        with unit.shard.acquired():
            moment, signed = self._moment(unit, group, key, part)
            return moment.decode(signed)[: part.numel].clone()

    def write(self, unit: Unit, group: Group, key: str, part: Fragment, values: torch.Tensor) -> None:
        """See `ShardOptimizer.write`."""
        with unit.shard.acquired(changed=True):
            moment, signed = self._moment(unit, group, key, part)
            padded = moment.values.new_zeros(moment.numel, dtype=torch.float32)
            padded[: part.numel] = values
            moment.write(padded, signed)

    def kept(self, unit: Unit, group: Group, part: Fragment, make: Collection[str] = ()) -> dict[str, Kept]:
        """See `ShardOptimizer.kept`."""
        names = self._formula(group).state_names
        return {key: Kept(*self._moment(unit, group, key, part)) for key in names}

    def restart(self, unit: Unit, group: Group, part: Fragment | None = None) -> None:
        """See `ShardOptimizer.restart`."""
        if part is None:
            states, signs = self.states(unit, group), self._formula(group).signed
            pairs = [pair for _, moments in states.runs for pair in zip(moments, signs, strict=True)]
            self.set_number(unit, group, "step", 0)
        else:
            pairs = list(self.kept(unit, group, part).values())
        for moment, signed in pairs:
            moment.fill(float(group.get("initial_accumulator_value", 0.0)), signed)

    def _moment(self, unit: Unit, group: Group, key: str, part: Fragment) -> tuple[Moment, bool]:
        """The state of a fragment, with the padding after it in its last block; and whether it has signs."""
        index = self._formula(group).state_names.index(key)
        for run, moments in self.states(unit, group).runs:
            if run.start <= part.at < run.start + run.numel:
                numel = round_up(part.numel, self.formats.alignment)
                start = part.at - run.start
                moment = moments[index].narrow(start, min(numel, run.numel - start))
                return moment, self._formula(group).signed[index]
        raise RuntimeError(f"unit '{unit.plan.name}' has no state for element {part.at} of its shard")

    def forget(self) -> None:
        """See `ShardOptimizer.forget`."""
        self._states.clear()


def _conclude(unit: Unit) -> None:
    """Wait until the unit's number of steps is known."""
    unit.shard.settle()
    if (optimizer := unit.optimizer()) is not None:
        optimizer.conclude()


class FusedOptimizer(torch.optim.Optimizer):
    """Parameter groups and hyperparameters for `zero.initialize(optimizer=...)`, which updates shards by our kernels.

        optimizer = zero.FusedOptimizer(model.parameters(), "AdamW", lr=1e-3, zero={"moments": "8bit"})

    It equals the section `optimizer` of the JSON, for programs that must pass an object, on every placement
    (a drive too). It updates nothing by itself. `kind` is Adam, AdamW, Lamb, Lion, SGD or Adagrad; the arguments are
    those of `optimizer.params`, and groups may have their own. Raises ValueError with all errors, by argument.
    """

    def __init__(self, params: Any, kind: str, **arguments: Any) -> None:
        reason = torch_reason(kind, arguments)
        if reason is not None:
            raise ValueError(f"FusedOptimizer(kind={kind!r}): {reason}; give initialize() the class of torch.optim")
        if kind.lower() == "muon":
            raise ValueError(
                f"FusedOptimizer(kind={kind!r}): name it in the section 'optimizer' of the JSON, which chooses the "
                "matrices, or give initialize() a torch.optim.Muon"
            )
        if lines := optimizer_problems(kind, arguments, True, ("FusedOptimizer",)):
            raise ValueError("\n".join(lines))
        self.kind, self.arguments = kind, arguments
        checked = ARGUMENTS[kind.lower()].model_validate(arguments)
        super().__init__(params, FusedShardOptimizer(kind.lower(), checked, "bf16").defaults)

    def step(self, closure: Any = None) -> None:
        """Raise RuntimeError: only the engine's step updates."""
        name = type(self).__name__
        raise RuntimeError(
            f"{name}.step(): it updates nothing itself; give it to zero.initialize(), call engine.step()"
        )
