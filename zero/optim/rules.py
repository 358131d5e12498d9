"""How one unit's shard is updated: one of our fused formulas, or any element-wise optimizer of `torch.optim`."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
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
from zero.plan.layout import Fragment, Span, round_up

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
    foreseen: bool  # how large the state is, and where it lies, is known before the first step, as files need it

    def check(self, group: Group) -> None:
        """Raise ValueError for hyperparameters that no step can be taken with; nothing was touched then."""

    def begin(self, unit: Unit, group: Group) -> None:
        """Make the state of the unit, so that it is where it rests before the first step."""

    def update(self, unit: Unit, grad: torch.Tensor, group: Group, factor: float, threads: int | None = None) -> None:
        """Apply one step with gradient = `factor` x `grad` [n]; writes master and its shard.

        The state must be lent. `threads`: how many compute it on a CPU; default torch's.
        """

    def nbytes(self, unit: Unit, group: Group) -> int:
        """Bytes of the optimizer state that the rule keeps for the unit, master not counted."""

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Span, torch.Tensor]]:
        """All tensors of the unit's state that exist, as they are kept: name, elements of the shard, and the tensor."""

    def keys(self, unit: Unit, group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Torch's names of the states: those with an element per parameter, and single numbers of the unit."""

    def number(self, unit: Unit, group: Group, key: str) -> float:
        """The number `key`; "step" is an int."""

    def set_number(self, unit: Unit, group: Group, key: str, value: float) -> None:
        """Replace it."""

    def read(self, unit: Unit, group: Group, key: str, part: Fragment) -> torch.Tensor:
        """State `key` of a fragment of the shard, fp32 [n], a copy; before the first step, where that begins."""

    def write(self, unit: Unit, group: Group, key: str, part: Fragment, values: torch.Tensor) -> None:
        """Replace it by `values`, fp32 [n], rounded to nearest where the state is kept in fewer bits."""

    def kept(self, unit: Unit, group: Group, part: Fragment, make: bool = False) -> dict[str, Kept]:
        """All states of a fragment of the shard as they are kept, views to read and write while the state is lent.

        The last block of one in 8 bit is whole, so it may have elements behind the fragment, which are padding.
        Empty where the state does not exist yet, unless it is to `make`.
        """

    def forget(self) -> None:
        """Give all state back."""


class Kept(NamedTuple):
    """One state of some elements, and whether it can be negative."""

    moment: Moment
    signed: bool


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

    foreseen = True

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

    def begin(self, unit: Unit, group: Group) -> None:
        """See `Rule.begin`."""
        self.states(unit, group)

    def update(self, unit: Unit, grad: torch.Tensor, group: Group, factor: float, threads: int | None = None) -> None:
        """One step of the formula on the unit's shard, with the hyperparameters of `group`; see `Rule.update`."""
        formula = self._formula(group)
        states = self.states(unit, group)
        self._states[unit.index] = states = states._replace(steps=states.steps + 1)
        master, param = unit.master.tensor, unit.master.rounding
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
                threads=threads,
            )

    def states(self, unit: Unit, group: Group) -> States:
        """The unit's state; new, at step 0, before the first step, and when SGD's momentum begins or ends."""
        formula = self._formula(group)
        known = self._states.get(unit.index)
        if known is None or known.names != formula.state_names:
            window = unit.window
            value, device = float(group.get("initial_accumulator_value", 0.0)), unit.home.updates
            kept = tuple(
                (run, tuple(Moment.filled(run.numel, run.format, value, device, signed) for signed in formula.signed))
                for run in runs(unit.plan, window, self.formats.moments)
            )
            self._states[unit.index] = known = States(formula.state_names, window.start, kept, 0)
            unit.home.states.put([tensor for _, _, tensor in self.tensors(unit)])
        return known

    def nbytes(self, unit: Unit, group: Group) -> int:
        """See `Rule.nbytes`."""
        return self.states(unit, group).nbytes

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Span, torch.Tensor]]:
        """See `Rule.tensors`; codes of 8 bit are followed by their scales."""
        known = self._states.get(unit.index)
        for run, moments in known.runs if known else ():
            for name, moment in zip(known.names, moments, strict=True):
                span = Span(run.start, run.numel)
                yield name, span, moment.values
                if moment.scales is not None:
                    yield f"a scale of {name}", span, moment.scales

    def keys(self, unit: Unit, group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See `Rule.keys`."""
        return self._formula(group).state_names, ("step",)

    def number(self, unit: Unit, group: Group, key: str) -> float:
        """See `Rule.number`."""
        unit.settle()
        return self.states(unit, group).steps

    def set_number(self, unit: Unit, group: Group, key: str, value: float) -> None:
        """See `Rule.set_number`."""
        unit.settle()
        self._states[unit.index] = self.states(unit, group)._replace(steps=int(value))

    def read(self, unit: Unit, group: Group, key: str, part: Fragment) -> torch.Tensor:
        """See `Rule.read`."""
        with unit.borrow():
            moment, signed = self._moment(unit, group, key, part)
            return moment.decode(signed)[: part.numel].clone()

    def write(self, unit: Unit, group: Group, key: str, part: Fragment, values: torch.Tensor) -> None:
        """See `Rule.write`."""
        with unit.borrow(written=True):
            moment, signed = self._moment(unit, group, key, part)
            padded = moment.values.new_zeros(moment.numel, dtype=torch.float32)
            padded[: part.numel] = values
            moment.write(padded, signed)

    def kept(self, unit: Unit, group: Group, part: Fragment, make: bool = False) -> dict[str, Kept]:
        """See `Rule.kept`."""
        names = self._formula(group).state_names
        return {key: Kept(*self._moment(unit, group, key, part)) for key in names}

    def _moment(self, unit: Unit, group: Group, key: str, part: Fragment) -> tuple[Moment, bool]:
        """The state of a fragment, with the padding behind it that shares its last block; and whether it has signs."""
        index = self._formula(group).state_names.index(key)
        for run, moments in self.states(unit, group).runs:
            if run.start <= part.at < run.start + run.numel:
                numel = round_up(part.numel, self.formats.alignment)
                start = part.at - run.start
                found = moments[index].narrow(start, min(numel, run.numel - start))
                return found, self._formula(group).signed[index]
        raise RuntimeError(f"unit '{unit.plan.name}' has no state for element {part.at} of its shard")

    def forget(self) -> None:
        """See `Rule.forget`."""
        self._states.clear()


class TorchRule:
    """An optimizer class of `torch.optim` on fp32 shards: one instance per unit, fed by the unit's group."""

    foreseen = False

    def __init__(self, kind: type[torch.optim.Optimizer], params: dict[str, Any]) -> None:
        self._kind = kind
        # Constructed once on a throw-away parameter, so that a bad argument fails here and now.
        self.defaults = dict(kind([nn.Parameter(torch.zeros(1))], **params).defaults)
        self.formats = Formats()  # the number of states is Adam's: what a class keeps shows at its first step only
        self._params = params
        self._inner: dict[int, tuple[nn.Parameter, torch.optim.Optimizer]] = {}

    def check(self, group: Group) -> None:
        """See `Rule.check`; torch's classes look at their arguments at the start only."""

    def begin(self, unit: Unit, group: Group) -> None:
        """See `Rule.begin`; torch's classes make their state in the first step."""

    def update(self, unit: Unit, grad: torch.Tensor, group: Group, factor: float, threads: int | None = None) -> None:
        """One step of the torch optimizer on the unit's shard, with torch's own threads; see `Rule.update`."""
        leaf, inner = self._instance(unit, group)
        leaf.grad = grad.to(leaf.dtype).mul_(factor)
        inner.step()
        leaf.grad = None
        unit.master.publish()

    def nbytes(self, unit: Unit, group: Group) -> int:
        """See `Rule.nbytes`."""
        return sum(tensor.nbytes for _, _, tensor in self.tensors(unit))

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Span, torch.Tensor]]:
        """See `Rule.tensors`."""
        if unit.index in self._inner:
            leaf, inner = self._inner[unit.index]
            for name, value in inner.state[leaf].items():
                if isinstance(value, torch.Tensor):
                    yield name, Span(0, leaf.numel()), value

    def keys(self, unit: Unit, group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See `Rule.keys`; found by a step of the class on three throw-away elements."""
        leaf = nn.Parameter(torch.zeros(3, device=unit.home.updates))
        leaf.grad = torch.zeros_like(leaf)
        trial = self._kind([leaf], **self._params)
        trial.param_groups[0].update(_hyperparameters(group))
        trial.step()
        state = {key: value for key, value in trial.state[leaf].items() if value is not None}
        wide = tuple(key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == (3,))
        return wide, tuple(key for key in state if key not in wide)

    def number(self, unit: Unit, group: Group, key: str) -> float:
        """See `Rule.number`."""
        unit.settle()
        value = self._state(unit, group).get(key, 0)
        value = value.item() if isinstance(value, torch.Tensor) else value
        return int(value) if key == "step" else value

    def set_number(self, unit: Unit, group: Group, key: str, value: float) -> None:
        """See `Rule.set_number`."""
        unit.settle()
        state = self._state(unit, group)
        if isinstance(state.get(key), torch.Tensor):
            state[key].fill_(value)
        else:
            state[key] = int(value) if key == "step" else value

    def read(self, unit: Unit, group: Group, key: str, part: Fragment) -> torch.Tensor:
        """See `Rule.read`."""
        unit.settle()
        kept = self._state(unit, group).get(key)
        if kept is None:  # made in the first step, out of zeros; to make it now could change that step
            return torch.zeros(part.numel, device=unit.home.updates)
        return kept.narrow(0, part.at, part.numel).to(torch.float32, copy=True)

    def write(self, unit: Unit, group: Group, key: str, part: Fragment, values: torch.Tensor) -> None:
        """See `Rule.write`."""
        unit.settle()
        state = self._state(unit, group)
        if state.get(key) is None:
            state[key] = torch.zeros_like(unit.master.tensor)
        state[key].narrow(0, part.at, part.numel).copy_(values)

    def kept(self, unit: Unit, group: Group, part: Fragment, make: bool = False) -> dict[str, Kept]:
        """See `Rule.kept`."""
        if make:
            state = self._state(unit, group)
        else:
            leaf, inner = self._inner.get(unit.index, (None, None))
            state = inner.state.get(leaf, {}) if inner is not None else {}
        shape = unit.master.tensor.shape
        wide = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == shape}
        return {key: Kept(Moment(value.narrow(0, part.at, part.numel)), True) for key, value in wide.items()}

    def forget(self) -> None:
        """See `Rule.forget`."""
        self._inner.clear()

    def _instance(self, unit: Unit, group: Group) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        """The unit's optimizer and what it updates, with the hyperparameters of now."""
        if unit.index not in self._inner:
            leaf = nn.Parameter(unit.master.tensor)
            self._inner[unit.index] = (leaf, self._kind([leaf], **self._params))
        leaf, inner = self._inner[unit.index]
        inner.param_groups[0].update(_hyperparameters(group))
        return leaf, inner

    def _state(self, unit: Unit, group: Group) -> dict[str, Any]:
        """What the unit's optimizer keeps; before the first step, what torch's classes would begin that step with.

        Raises RuntimeError for a class that is not torch's and has no state yet.
        """
        leaf, inner = self._instance(unit, group)
        if inner.state.get(leaf):
            return inner.state[leaf]
        begin = getattr(inner, "_init_group", None)
        if begin is None or self._kind.__module__.split(".")[0] != "torch":
            raise RuntimeError(f"{self._kind.__name__} makes its state in its first step; read or write it after that")
        leaf.grad = torch.zeros_like(leaf)
        # All but the group are lists that the class fills for its loop; what matters is the state it makes on the way.
        begin(inner.param_groups[0], *([] for _ in list(inspect.signature(begin).parameters)[1:]))
        leaf.grad = None
        return inner.state[leaf]


def _hyperparameters(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


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
