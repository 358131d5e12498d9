"""Learning-rate schedules: classes that write their rates to an optimizer, and a builder.

Names, defaults and sequences of rates are DeepSpeed's. An *iteration* counts from -1: construction writes the
rate of iteration -1, the smallest, and `step()`, which the engine calls after each applied optimizer step,
moves on to 0, 1, ... So optimizer step k = 0, 1, ... runs at the rate of iteration k - 1; and since a warm-up
begins at iteration 0 with a gamma of 0, its first *two* optimizer steps run at the smallest rate.
"""

from __future__ import annotations

import abc
import copy
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch.optim import Optimizer, lr_scheduler

from zero.config.instead import did_you_mean
from zero.config.values import Bool, Count, NotNegative, Number, Positive, integer

FromMinusOne = integer(-1)
PerGroup = NotNegative | list[NotNegative]  # a number for all parameter groups, or one for each
_KINDS = {"int": Number, "float": Number, "bool": Bool}  # by torch's annotations
PerGroupOrOwn = PerGroup | None  # None: the groups' own rates


class ScheduleError(ValueError):
    """A wrong parameter of a schedule; the message begins with its name, so that a path can be put before it."""


@dataclass(eq=False)
class Schedule(abc.ABC):
    """Base of our schedules: writes `_lrs(iteration)` into the optimizer's groups, one number per group.

    A subclass is a dataclass of its parameters, which are checked by their annotations; those per group become lists.
    `last_batch_iteration` is -1 for a new run; with another value, for a run whose optimizer state was loaded, the
    groups keep their values until the next `step()`.
    """

    optimizer: Any

    def __post_init__(self) -> None:
        self.optimizer = _torch_optimizer(self.optimizer)
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            if name != "optimizer":
                value = _checked(name, kind, getattr(self, name))
                setattr(self, name, self._per_group(name, value) if kind in (PerGroup, PerGroupOrOwn) else value)
        self._adjust()
        if self.last_batch_iteration == -1:
            self._write()
        else:
            self._last_lr = self._group_lrs()

    @abc.abstractmethod
    def _lrs(self, iteration: int) -> list[float]:
        """The learning rate of each parameter group at an iteration; -1 is before the first."""

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group at the current iteration, from the formula."""
        return self._lrs(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group that was written last."""
        return list(self._last_lr)

    def step(self, batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the one given, and write its values into the optimizer's groups."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration
        self._write()

    def state_dict(self) -> dict[str, int]:
        """`{"last_batch_iteration": n}`, the whole state of a schedule."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to the iteration of a saved state and write its values, for the next optimizer step."""
        key = "last_batch_iteration"
        self.last_batch_iteration = _checked(key, FromMinusOne, state[key])
        self._write()

    def _adjust(self) -> None:  # noqa: B027 - not every schedule needs it
        """Adjust checked parameters to each other, and warn of those without effect."""

    def _group_lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _per_group(self, name: str, value: Any) -> list[float]:
        """One number per parameter group: a list of that length, a single number for all, or None for their own."""
        count = len(self.optimizer.param_groups)
        if not isinstance(value, list):
            return self._group_lrs() if value is None else [value] * count
        if len(value) != count:
            raise ScheduleError(f"{name}: wanted one number, or {count} (one per group), got {value!r}")
        return value

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            # A capturable optimizer's rate is a tensor that a captured graph reads; the graph would not see a new one.
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


class _Warmup(Schedule):
    """The warm-up of schedules, with DeepSpeed's names for its rates if it has any."""

    min_lrs, max_lrs = (property(operator.attrgetter(name)) for name in ("warmup_min_lr", "warmup_max_lr"))

    def _gamma(self, iteration: int) -> float:
        """The fraction of the way from min to max: 0 up to iteration 0, 1 from the end of the warm-up on."""
        if iteration < 0:
            return 0.0
        if iteration >= self.warmup_num_steps:
            return 1.0
        if self.warmup_type == "log":
            return math.log(iteration + 1) / math.log(self.warmup_num_steps)
        return iteration / self.warmup_num_steps

    def _lrs(self, iteration: int) -> list[float]:
        return _between(self.warmup_min_lr, self.warmup_max_lr, self._gamma(iteration))

    def _adjust(self) -> None:
        self.warmup_num_steps = max(2, self.warmup_num_steps)  # log(1) is 0
        if self.warmup_type not in ("log", "linear"):
            text = f"warmup_type {self.warmup_type!r} is unknown, so it is 'log'; there is 'linear', too"
            warnings.warn(f"scheduler: {text}", stacklevel=4)
            self.warmup_type = "log"
        total = getattr(self, "total_num_steps", math.inf)
        if total < self.warmup_num_steps:
            text = f"total_num_steps {total} is less than warmup_num_steps {self.warmup_num_steps}"
            warnings.warn(f"scheduler: {text}", stacklevel=4)


@dataclass(eq=False)
class WarmupLR(_Warmup):
    """From `warmup_min_lr` to `warmup_max_lr` (None: the group's own) in `warmup_num_steps`, then constant.

    `warmup_type` is "log" or "linear". A warm-up has at least 2 steps. The rates may be lists, one per group.
    """

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroupOrOwn = None
    warmup_num_steps: Count = 1000
    warmup_type: Any = "log"
    last_batch_iteration: FromMinusOne = -1


@dataclass(eq=False)
class WarmupDecayLR(_Warmup):
    """`WarmupLR`, then a straight line back to `warmup_min_lr`, which is reached at `total_num_steps`."""

    total_num_steps: Positive
    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroupOrOwn = 0.001
    warmup_num_steps: Count = 1000
    warmup_type: Any = "log"
    last_batch_iteration: FromMinusOne = -1

    def _gamma(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return super()._gamma(iteration)
        # The straight line: 1 at the end of the warm-up, 0 from `total_num_steps` on.
        rest, steps = self.total_num_steps - iteration, self.total_num_steps - self.warmup_num_steps
        return max(0.0, rest / max(1, steps))


@dataclass(eq=False)
class WarmupCosineLR(_Warmup):
    """Each group's own rate times a ratio: `warmup_min_ratio` to 1 in `warmup_num_steps`, then a half cosine.

    The cosine ends at `cos_min_ratio` at iteration `total_num_steps - 1` and stays there. At iteration -1 the
    rate is 0, whatever `warmup_min_ratio` says, as in DeepSpeed.
    """

    total_num_steps: Positive
    warmup_min_ratio: NotNegative = 0.0
    warmup_num_steps: Count = 1000
    cos_min_ratio: NotNegative = 0.0001
    warmup_type: Any = "log"
    last_batch_iteration: FromMinusOne = -1

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self._gamma(iteration)
        # The half cosine: from just under 1 down to the floor, reached at the last iteration of the run.
        steps = self.total_num_steps - self.warmup_num_steps
        progress = (iteration - self.warmup_num_steps + 1) / max(1, steps)
        height = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * height)

    def get_lr_ratio(self) -> float:
        """The factor on the groups' own rates at the current iteration."""
        return self._ratio(self.last_batch_iteration)

    def _lrs(self, iteration: int) -> list[float]:
        ratio = self._ratio(iteration)
        return [lr * ratio for lr in self.own_lrs]

    def _adjust(self) -> None:
        super()._adjust()
        self.own_lrs = self._group_lrs()


@dataclass(eq=False)
class OneCycle(Schedule):
    """One triangle from `cycle_min_lr` to `cycle_max_lr` and back, then the min rate over a growing factor.

    While the rate rises, the first beta falls from `cycle_max_mom` to `cycle_min_mom`, and the other way round; after
    the cycle it grows by `decay_mom_rate`. Decay needs `decay_step_size` and a rate, or the end of the cycle stays.
    Stair counts cut a half into that many stairs, 0 into none; size and stairs of the second half are the first's
    unless given. As in DeepSpeed the second beta becomes 0.99, construction writes `cycle_min_mom`, and an optimizer
    without betas keeps its momentum (a warning says so).
    """

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: NotNegative = 0.0
    cycle_first_step_size: Positive = 2000
    cycle_second_step_size: Count | None = None
    cycle_first_stair_count: FromMinusOne = 0
    cycle_second_stair_count: FromMinusOne | None = None
    decay_step_size: NotNegative = 0
    cycle_momentum: Bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: Number = 0.0
    last_batch_iteration: FromMinusOne = -1

    min_lrs, max_lrs = (property(operator.attrgetter(name)) for name in ("cycle_min_lr", "cycle_max_lr"))

    @property
    def step_ratio(self) -> float:
        """The fraction of the cycle in which the rate rises."""
        return self.cycle_first_step_size / (self.cycle_first_step_size + self.cycle_second_step_size)

    def _lrs(self, iteration: int) -> list[float]:
        if (factor := self._decay(iteration, self.decay_lr_rate)) is not None:
            return [low / factor for low in self.cycle_min_lr]
        return _between(self.cycle_min_lr, self.cycle_max_lr, self._height(iteration))

    def _moms(self, iteration: int) -> list[float]:
        """The first beta of each parameter group at an iteration."""
        if (factor := self._decay(iteration, self.decay_mom_rate)) is not None:
            return [high * factor for high in self.cycle_max_mom]
        height = self._height(iteration)
        return [high - (high - low) * height for low, high in zip(self.cycle_min_mom, self.cycle_max_mom, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each parameter group at this iteration; None if momentum is not cycled."""
        return [(mom, 0.99) for mom in self._moms(self.last_batch_iteration)] if self.cycle_momentum else None

    def _adjust(self) -> None:
        if self.cycle_second_step_size is None:
            self.cycle_second_step_size = self.cycle_first_step_size
        if self.cycle_second_stair_count is None:
            self.cycle_second_stair_count = self.cycle_first_stair_count
        if self.cycle_momentum and any("betas" not in group for group in self.optimizer.param_groups):
            name = type(self.optimizer).__name__
            warnings.warn(f"OneCycle: {name} has no betas, so cycle_momentum has no effect", stacklevel=4)
            self.cycle_momentum = False

    def _decay(self, iteration: int, rate: float) -> float | None:
        """The factor after the cycle, 1 without a step size or a rate; None within it."""
        after = iteration - (self.cycle_first_step_size + self.cycle_second_step_size) + 1
        if after <= 0:
            return None
        return 1.0 if self.decay_step_size == 0 or rate == 0 else 1 + rate * after / self.decay_step_size

    def _height(self, iteration: int) -> float:
        """The height in the triangle, 0 to 1; with stairs, that of the stair, which is never above the line."""
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        steps, size, stairs = (iteration + 1) % (first + second), first, self.cycle_first_stair_count
        if steps > first:
            steps, size, stairs = first + second - steps, second, self.cycle_second_stair_count
        return steps * stairs // size / stairs if stairs > 0 else steps / size

    def _write(self) -> None:
        super()._write()
        if self.cycle_momentum:
            moms = self.cycle_min_mom if self.last_batch_iteration == -1 else self._moms(self.last_batch_iteration)
            for group, mom in zip(self.optimizer.param_groups, moms, strict=True):
                group["betas"] = (mom, 0.99)


@dataclass(eq=False)
class LRRangeTest(Schedule):
    """A rate that grows steadily, or in stairs, to find the rate at which training diverges.

    By `lr_range_test_step_rate` times the min rate every `lr_range_test_step_size` iterations.
    """

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: Positive = 2000
    lr_range_test_step_rate: Number = 1.0
    lr_range_test_staircase: Bool = False
    last_batch_iteration: FromMinusOne = -1

    def _lrs(self, iteration: int) -> list[float]:
        interval = (iteration + 1) / self.lr_range_test_step_size
        interval = math.floor(interval) if self.lr_range_test_staircase else interval
        factor = 1 + self.lr_range_test_step_rate * interval
        return [low * factor for low in self.lr_range_test_min_lr]


_OURS = {cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)}
_OF_TORCH = {
    name: cls
    for name, cls in inspect.getmembers(lr_scheduler, inspect.isclass)
    if issubclass(cls, lr_scheduler.LRScheduler) and cls is not lr_scheduler.LRScheduler and name[0] != "_"
}
_SCHEDULES: dict[str, type] = {**_OURS, **_OF_TORCH, **_OURS}


def schedules() -> list[str]:
    """Every name that `scheduler.type` may have: ours first, then torch's."""
    return list(_SCHEDULES)


def build_scheduler(optimizer: Any, type: str, params: Mapping[str, Any] | None = None) -> Any:
    """The scheduler of the JSON section `scheduler`; a ValueError names the path of a wrong value.

    optimizer: a torch optimizer, or a wrapper that has it as `.optimizer`; type: one of `schedules()`; params: keyword
    arguments of the schedule.
    """
    params = params or {}
    if lines := schedule_problems(type, params):
        raise ValueError("\n".join(lines))
    made, optimizer = _SCHEDULES[type], _torch_optimizer(optimizer)
    try:
        if type not in _OURS:
            _try(made, optimizer, params)
        return made(optimizer, **params)
    except ScheduleError as error:
        raise ValueError(f"scheduler.params.{error}") from None
    except Exception as error:
        why = f"{error.__class__.__name__}: {error}"
        raise ValueError(f"scheduler.params: {type} did not accept {params!r}: {why}") from error


def _try(made: Callable[..., Any], optimizer: Optimizer, params: Mapping[str, Any]) -> None:
    """Make a schedule of torch and step it once, for a copy of this optimizer that trains nothing.

    Many wrong arguments raise only in its first step, which would be after an update.
    """
    groups = [
        {key: [torch.zeros(1)] if key == "params" else copy.deepcopy(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real schedule repeats them
        trial = made(Optimizer(groups, dict(optimizer.defaults)), **params)
        trial.step(*[0.0] * isinstance(trial, lr_scheduler.ReduceLROnPlateau))


def schedule_problems(kind: str, params: Mapping[str, Any]) -> list[str]:
    """Errors in type and parameters of the JSON section `scheduler` that can be found without an optimizer."""
    cls = _SCHEDULES.get(kind)
    if cls is None:
        near, known = did_you_mean(str(kind), schedules()), ", ".join(schedules())
        return [f"scheduler.type: unknown schedule {kind!r}{near} There are: {known}"]
    signature = list(inspect.signature(cls).parameters.values())[1:]  # the first is the optimizer
    names = [parameter.name for parameter in signature]
    lines = [
        f"scheduler.params.{key}: {kind} has no such parameter (got {value!r}){did_you_mean(key, names)} "
        f"It has: {', '.join(names)}"
        for key, value in params.items()
        if key not in names
    ]
    given = ", ".join(params) or "none"
    lines += [
        f"scheduler.params.{parameter.name}: {kind} needs it; given: {given}"
        for parameter in signature
        if parameter.default is inspect.Parameter.empty and parameter.name not in params
    ]
    types = {each.name: _KINDS.get(getattr(each.annotation, "__name__", each.annotation), Any) for each in signature}
    types |= get_type_hints(cls, include_extras=True) if cls in _OURS.values() else {}
    for key, value in params.items():
        try:
            _checked(key, types.get(key, Any), value)
        except ScheduleError as error:
            lines.append(f"scheduler.params.{error}")
    return lines


def _checked(name: str, kind: Any, value: Any) -> Any:
    """`value` as a parameter of this kind; a ScheduleError says what was wanted."""
    if kind in (PerGroup, PerGroupOrOwn):
        if isinstance(value, (list, tuple)):
            return [_checked(f"{name}[{i}]", NotNegative, item) for i, item in enumerate(value)]
        if value is None and kind == PerGroupOrOwn:
            return None
        kind = NotNegative
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        wanted = error.errors()[0]["ctx"]["wanted"]
        raise ScheduleError(f"{name}: wanted {wanted}, got {value!r}") from None


def _between(low: list[float], high: list[float], part: float) -> list[float]:
    return [bottom + (top - bottom) * part for bottom, top in zip(low, high, strict=True)]


def _torch_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper, or the object itself."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) and not isinstance(optimizer, Optimizer) else optimizer
