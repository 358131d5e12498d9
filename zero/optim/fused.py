"""Adam, AdamW, Lion, SGD and Adagrad on the shards of units, each in one fused pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from zero.config.check import optimizer_problems
from zero.config.optimizers import ARGUMENTS, ONLY_TORCH, Arguments, torch_reason
from zero.core.unit import Unit
from zero.kernels.formulas import FORMULAS, Formula, formats_of
from zero.kernels.moments import Moment
from zero.kernels.step import step as fused_step
from zero.optim.fused_states import FusedStates, States
from zero.optim.shard_optimizer import Group, ShardOptimizer
from zero.plan.formats import Run

# Arguments that matter only before the first step and mean nothing in a parameter group.
_NOT_IN_GROUPS = ("zero", "amsgrad", "eps_inside_sqrt", "fp32_optimizer_states", *ONLY_TORCH)


class FusedShardOptimizer(ShardOptimizer):
    """Adam, AdamW, Lion, SGD and Adagrad, each in one fused pass over the shard (zero/kernels/step.py).

    `kind` is a key of ARGUMENTS, `params` its checked arguments, `compute_dtype` the dtype of the parameters.

    section: the JSON section that describes it.
    """

    factor_on_device = True
    marks_changes = True

    def __init__(self, kind: str, params: Arguments, compute_dtype: str) -> None:
        self._formula = FORMULAS[kind]
        self.section = {"type": kind, "params": params.model_dump(exclude_unset=True)}
        self.defaults = {key: value for key, value in params if key not in _NOT_IN_GROUPS}
        self.states = FusedStates(self._formula, formats_of(kind, params, compute_dtype))

    def check(self, group: Group) -> None:
        self._formula(group)

    def update(
        self, unit: Unit, grad: torch.Tensor, group: Group, factor: float | torch.Tensor, threads: int | None = None
    ) -> None:
        """One step of the formula on the unit's shard, with the hyperparameters of `group`; see `ShardOptimizer`."""
        self.states.begin(unit, group)
        states = self.states.count(unit, 1)
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
        for unit in units:
            self.states.count(unit, -1)


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
