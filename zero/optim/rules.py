"""How one unit's shard is updated: one of our fused formulas, or any element-wise optimizer of `torch.optim`."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from zero.config.optimizers import ARGUMENTS, Arguments, torch_reason
from zero.core.unit import Unit
from zero.kernels.formulas import Adagrad, Adam, Formula, Lion, Sgd
from zero.kernels.moments import Moment
from zero.kernels.step import step as fused_step
from zero.log import rank_zero
from zero.plan.formats import Formats, Run, runs

Group = Mapping[str, Any]

# These look at whole matrices or at the whole model, which a shard is not.
NOT_ELEMENTWISE = {
    "Adafactor": "it factors the second moment over rows and columns of whole matrices",
    "LBFGS": "it needs a closure and inner products over the whole model",
    "Muon": "it orthogonalizes whole matrices",
    "SparseAdam": "it needs sparse gradients, and gradients here are dense",
}


class Rule(Protocol):
    """Updates the shard of one unit with one parameter group's hyperparameters."""

    defaults: dict[str, Any]
    formats: Formats

    def check(self, group: Group) -> None:
        """Raise ValueError for hyperparameters that no step can be taken with; nothing was touched then."""

    def update(self, unit: Unit, group: Group, factor: float) -> None:
        """Apply one step with gradient = `factor` x `unit.gradients.shard`; writes master and shard."""

    def nbytes(self, unit: Unit, group: Group) -> int:
        """Bytes of the optimizer state that the rule keeps for the unit, master not counted."""

    def forget(self) -> None:
        """Give all state back."""


def _adam(group: Group, decoupled: bool) -> Adam:
    beta1, beta2 = map(float, group["betas"])
    numbers = (float(group[key]) for key in ("eps", "weight_decay"))
    return Adam(float(group["lr"]), beta1, beta2, *numbers, decoupled, bool(group["bias_correction"]))


def _lion(group: Group) -> Lion:
    beta1, beta2 = map(float, group["betas"])
    return Lion(float(group["lr"]), beta1, beta2, float(group["weight_decay"]))


def _sgd(group: Group) -> Sgd:
    numbers = (float(group[key]) for key in ("lr", "momentum", "dampening", "weight_decay"))
    return Sgd(*numbers, bool(group["nesterov"]))


def _adagrad(group: Group) -> Adagrad:
    return Adagrad(*(float(group[key]) for key in ("lr", "lr_decay", "eps", "weight_decay")))


_FORMULAS: Mapping[str, Callable[[Group], Formula]] = {
    # As in DeepSpeed, "Adam" means decoupled weight decay unless `adam_w_mode` is false.
    "adam": lambda group: _adam(group, group["adam_w_mode"]),
    "adamw": lambda group: _adam(group, True),
    "lion": _lion,
    "sgd": _sgd,
    "adagrad": _adagrad,
}
# Arguments that decide before the first step and mean nothing in a parameter group.
_NOT_IN_GROUPS = ("zero", "torch_adam", "amsgrad", "fp32_optimizer_states", "maximize", "foreach", "fused")


class States(NamedTuple):
    """The optimizer's state for one shard: for each run of one format its moments; and how many steps it has seen."""

    names: tuple[str, ...]
    first: int  # of the shard in the unit's flat buffer, elements
    runs: tuple[tuple[Run, tuple[Moment, ...]], ...]
    steps: int

    @property
    def nbytes(self) -> int:
        """Bytes of all moments."""
        return sum(moment.nbytes for _, moments in self.runs for moment in moments)


class FusedRule:
    """Adam, AdamW, Lion, SGD and Adagrad, each in one fused pass over the shard (zero/kernels/step.py).

    `kind` is a key of ARGUMENTS, `params` its checked arguments, `compute_dtype` the dtype of the parameters.
    """

    def __init__(self, kind: str, params: Arguments, compute_dtype: str) -> None:
        self._formula = _FORMULAS[kind]
        self.defaults = {key: value for key, value in params if key not in _NOT_IN_GROUPS}
        master, moments = (params.zero.master, params.zero.moments) if params.zero else (None, "fp32")
        master = master or ("remainder" if compute_dtype == "bf16" else "fp32")
        self.formats = Formats(master, moments, len(self._formula(self.defaults).state_names))
        self._states: dict[int, States] = {}

    def check(self, group: Group) -> None:
        """See `Rule.check`."""
        self._formula(group)

    def update(self, unit: Unit, group: Group, factor: float) -> None:
        """One step of the formula on the unit's shard, with the hyperparameters of now; see `Rule.update`."""
        formula = self._formula(group)
        states = self.states(unit, group)
        self._states[unit.index] = states = states._replace(steps=states.steps + 1)
        master, param, grad = unit.master.tensor, unit.master.rounding, unit.gradients.shard
        for run, moments in states.runs:
            part = slice(run.start, run.start + run.numel)
            fused_step(
                formula,
                master[part],
                moments,
                grad[part],
                None if param is None else param[part],
                step=states.steps,
                grad_scale=factor,
                # Stochastic rounding takes its bits by unit, step and place in the unit: all the same on every stage.
                key=unit.index,
                first=0 if run.format == "fp32" else states.first + run.start,
            )

    def states(self, unit: Unit, group: Group) -> States:
        """The unit's state; new, at step 0, before the first step, and when SGD's momentum begins or ends."""
        formula = self._formula(group)
        known = self._states.get(unit.index)
        if known is None or known.names != formula.state_names:
            window = unit.window
            value, device = float(group.get("initial_accumulator_value", 0.0)), unit.shard.device
            kept = tuple(
                (run, tuple(Moment.filled(run.numel, run.format, value, device, signed) for signed in formula.signed))
                for run in runs(unit.plan, window, self.formats.moments)
            )
            self._states[unit.index] = known = States(formula.state_names, window.start, kept, 0)
        return known

    def nbytes(self, unit: Unit, group: Group) -> int:
        """See `Rule.nbytes`."""
        return self.states(unit, group).nbytes

    def forget(self) -> None:
        """See `Rule.forget`."""
        self._states.clear()


class TorchRule:
    """An optimizer class of `torch.optim` on fp32 shards: one instance per unit, fed by the unit's group."""

    def __init__(self, kind: type[torch.optim.Optimizer], params: dict[str, Any]) -> None:
        self._kind = kind
        # Constructed once on a throw-away parameter, so that a bad argument fails here and now.
        self.defaults = dict(kind([nn.Parameter(torch.zeros(1))], **params).defaults)
        self.formats = Formats()  # the number of states is Adam's: what a class keeps shows at its first step only
        self._params = params
        self._inner: dict[int, tuple[nn.Parameter, torch.optim.Optimizer]] = {}

    def check(self, group: Group) -> None:
        """See `Rule.check`; torch's classes look at their arguments at the start only."""

    def update(self, unit: Unit, group: Group, factor: float) -> None:
        """One step of the torch optimizer on the unit's shard; see `Rule.update`."""
        if unit.index not in self._inner:
            leaf = nn.Parameter(unit.master.tensor)
            self._inner[unit.index] = (leaf, self._kind([leaf], **self._params))
        leaf, inner = self._inner[unit.index]
        inner.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
        leaf.grad = unit.gradients.shard.mul_(factor)
        inner.step()
        leaf.grad = None
        unit.master.publish()

    def nbytes(self, unit: Unit, group: Group) -> int:
        """See `Rule.nbytes`."""
        if unit.index not in self._inner:
            return 0
        state = self._inner[unit.index][1].state
        return sum(
            value.nbytes for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)
        )

    def forget(self) -> None:
        """See `Rule.forget`."""
        self._inner.clear()


def make_rule(kind: str, params: dict[str, Any], compute_dtype: str) -> Rule:
    """The rule that `optimizer.type` and `optimizer.params` of the JSON name; raises ValueError by JSON path."""
    reason = torch_reason(kind, params)
    if reason is None:
        arguments = ARGUMENTS[kind.lower()].model_validate(params)
        return FusedRule(kind.lower(), arguments, compute_dtype)
    if kind.lower() in ARGUMENTS:
        rank_zero(logging.INFO, "optimizer %s runs as torch's own class, because %s", kind, reason)
        kind, params = _torch_arguments(kind.lower(), params)
    if kind in NOT_ELEMENTWISE:
        raise ValueError(
            f"optimizer.type: '{kind}' cannot run on shards: {NOT_ELEMENTWISE[kind]}; "
            "use an element-wise optimizer such as AdamW, Adagrad, SGD or RMSprop"
        )
    found = getattr(torch.optim, kind, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
        torchs = sorted(name for name, value in vars(torch.optim).items() if _is_optimizer(value))
        known = ["Adam", "AdamW", "Lion", *torchs]
        near = difflib.get_close_matches(kind, known, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"optimizer.type: unknown optimizer '{kind}'{hint} Known: {', '.join(dict.fromkeys(known))}")
    try:
        return TorchRule(found, params)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer.params: torch.optim.{kind} refuses {params}: {error}") from error


def _torch_arguments(kind: str, params: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of torch's class for one of ours, without the arguments that only ours has."""
    decoupled = kind == "adamw" or params.get("adam_w_mode", True)
    name = {"adam": "AdamW" if decoupled else "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}[kind]
    ours = ("torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states", "zero")
    return name, {key: value for key, value in params.items() if key not in ours}


def _is_optimizer(value: Any) -> bool:
    return (
        inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and value.__name__ not in NOT_ELEMENTWISE
    )
