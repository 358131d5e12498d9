"""Learning-rate schedules: thin classes that write the formulas of `zero.plan.rates` to an optimizer, and a builder.

Names, defaults and sequences of rates are DeepSpeed's. An *iteration* counts from -1: construction writes the
rate of iteration -1, the smallest, and `step()`, which the engine calls after each applied optimizer step,
moves on to 0, 1, ... So optimizer step k = 0, 1, ... runs at the rate of iteration k - 1; and since a warm-up
begins at iteration 0 with a gamma of 0, its first *two* optimizer steps run at the smallest rate.
"""

from __future__ import annotations

import abc
import difflib
import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zero.plan.rates import cosine_decay, cycle_height, decay_factor, linear_decay, range_test_factor, warmup_gamma


class ScheduleError(ValueError):
    """A parameter of a schedule is wrong: the message begins with its name, so a path can go before it."""


def _integer(key: str, value: object, low: int) -> int:
    # 1e4 is a float in JSON, and people write it for a number of steps.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ScheduleError(f"{key}: wanted an integer of at least {low}, got {value!r}")
    return value


def _number(key: str, value: object, low: float | None = None) -> float:
    wanted = "a finite number" + ("" if low is None else f" of at least {low:g}")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (low is not None and value < low):
        raise ScheduleError(f"{key}: wanted {wanted}, got {value!r}")
    return float(value)


def _boolean(key: str, value: object) -> bool:
    if value not in (0, 1):  # JSON people write them for false and true
        raise ScheduleError(f"{key}: wanted true or false, got {value!r}")
    return bool(value)


def _warmup_type(value: object) -> str:
    if value not in ("log", "linear"):
        warnings.warn(
            f"scheduler: warmup_type {value!r} is unknown, so it is 'log'; there is 'linear', too", stacklevel=3
        )
        return "log"
    return str(value)


def _per_group(key: str, value: object, count: int) -> list[float]:
    """Return one number per parameter group: a list must have as many, a single number is for all."""
    if not isinstance(value, (list, tuple)):
        return [_number(key, value, 0)] * count
    if len(value) != count:
        raise ScheduleError(f"{key}: wanted one number, or {count} (one per group), got {value!r}")
    return [_number(f"{key}[{i}]", item, 0) for i, item in enumerate(value)]


def _warn_short(total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        text = f"total_num_steps {total_num_steps} is less than warmup_num_steps {warmup_num_steps}"
        warnings.warn(f"scheduler: {text}", stacklevel=3)


def _basic_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside a wrapper, or the object itself."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) and not isinstance(optimizer, Optimizer) else optimizer


class Schedule(abc.ABC):
    """Base of our schedules: it writes `lrs_at(iteration)` into the optimizer's groups, one number per group.

    A subclass reads its parameters, then calls `_begin`. `last_batch_iteration` is -1 for a new run; with
    another value, for a run whose optimizer state was loaded, the groups are left as they are until the next
    `step()`.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        self.optimizer = _basic_optimizer(optimizer)
        self.last_batch_iteration = _integer("last_batch_iteration", last_batch_iteration, -1)

    @abc.abstractmethod
    def lrs_at(self, iteration: int) -> list[float]:
        """Return the learning rate of each parameter group at an iteration; -1 is before the first."""

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current iteration, from the formula."""
        return self.lrs_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group that was written last."""
        return list(self._last_lr)

    def step(self, batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the one given, and write its values into the optimizer's groups."""
        here = self.last_batch_iteration
        self.last_batch_iteration = here + 1 if batch_iteration is None else batch_iteration
        self._write()

    def state_dict(self) -> dict[str, int]:
        """Return `{"last_batch_iteration": n}`, all that a schedule has to remember."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to the iteration of a saved state and write its values, for the next optimizer step."""
        self.last_batch_iteration = _integer("last_batch_iteration", state["last_batch_iteration"], -1)
        self._write()

    def _begin(self) -> None:
        if self.last_batch_iteration == -1:
            self._write()
        else:
            self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            # A capturable optimizer's rate is a tensor that a captured graph reads; a new one would be lost.
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` (None: the group's own) in `warmup_num_steps`, then constant.

    `warmup_type` is "log" or "linear". A warm-up has at least 2 steps. The rates may be lists, one per group.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = self.optimizer.param_groups
        top = [float(group["lr"]) for group in groups] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = _per_group("warmup_min_lr", warmup_min_lr, len(groups))
        self.max_lrs = _per_group("warmup_max_lr", top, len(groups))
        self.warmup_num_steps = max(2, _integer("warmup_num_steps", warmup_num_steps, 1))
        self.warmup_type = _warmup_type(warmup_type)
        self._begin()

    def gamma_at(self, iteration: int) -> float:
        """Return where between the min and the max rate the schedule is at an iteration, from 0 to 1."""
        return warmup_gamma(iteration, self.warmup_num_steps, self.warmup_type)

    def lrs_at(self, iteration: int) -> list[float]:
        """Return the learning rate of each parameter group at an iteration."""
        gamma = self.gamma_at(iteration)
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line back to `warmup_min_lr`, which is reached at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _integer("total_num_steps", total_num_steps, 1)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_short(self.total_num_steps, self.warmup_num_steps)

    def gamma_at(self, iteration: int) -> float:
        """Return where between the min and the max rate the schedule is at an iteration, from 0 to 1."""
        if iteration < self.warmup_num_steps:
            return super().gamma_at(iteration)
        return linear_decay(iteration, self.total_num_steps, self.warmup_num_steps)


class WarmupCosineLR(Schedule):
    """Each group's own rate times a ratio: `warmup_min_ratio` to 1 in `warmup_num_steps`, then a half cosine.

    The cosine ends at `cos_min_ratio` at iteration `total_num_steps - 1` and stays there. At iteration -1 the
    rate is 0, whatever `warmup_min_ratio` says, as in DeepSpeed.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = _integer("total_num_steps", total_num_steps, 1)
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio, 0)
        self.warmup_num_steps = max(2, _integer("warmup_num_steps", warmup_num_steps, 1))
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio, 0)
        self.warmup_type = _warmup_type(warmup_type)
        self.own_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        _warn_short(self.total_num_steps, self.warmup_num_steps)
        self._begin()

    def ratio_at(self, iteration: int) -> float:
        """Return the factor on the groups' own rates at an iteration."""
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            gamma = warmup_gamma(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * gamma
        return cosine_decay(iteration, self.total_num_steps, self.warmup_num_steps, self.cos_min_ratio)

    def get_lr_ratio(self) -> float:
        """Return the factor on the groups' own rates at the current iteration."""
        return self.ratio_at(self.last_batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        """Return the learning rate of each parameter group at an iteration."""
        ratio = self.ratio_at(iteration)
        return [lr * ratio for lr in self.own_lrs]


class OneCycle(Schedule):
    """One triangle from `cycle_min_lr` to `cycle_max_lr` and back, then the min rate over a growing factor.

    While the rate rises, the first beta falls from `cycle_max_mom` to `cycle_min_mom`, and the other way
    round; after the cycle it grows by `decay_mom_rate`. Decay needs `decay_step_size` and a rate, or the end
    of the cycle stays. Stair counts cut a half into that many stairs, 0 into none; that of the second half is the
    first's unless given. As in DeepSpeed the second beta becomes 0.99, construction writes `cycle_min_mom`, and an
    optimizer without betas keeps its momentum (a warning says so).
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | list[float],
        cycle_max_lr: float | list[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | list[float] = 0.8,
        cycle_max_mom: float | list[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        count = len(self.optimizer.param_groups)
        self.min_lrs = _per_group("cycle_min_lr", cycle_min_lr, count)
        self.max_lrs = _per_group("cycle_max_lr", cycle_max_lr, count)
        self.decay_lr_rate = _number("decay_lr_rate", decay_lr_rate, 0)
        self.first_step_size = _integer("cycle_first_step_size", cycle_first_step_size, 1)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.second_step_size = _integer("cycle_second_step_size", second, 0)
        self.cycle_size = self.first_step_size + self.second_step_size
        # -1 is 0, as on DeepSpeed's own flags.
        stairs = _integer("cycle_first_stair_count", cycle_first_stair_count, -1)
        second = stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.stair_counts = stairs, _integer("cycle_second_stair_count", second, -1)
        self.decay_step_size = _number("decay_step_size", decay_step_size, 0)
        self.min_moms = _per_group("cycle_min_mom", cycle_min_mom, count)
        self.max_moms = _per_group("cycle_max_mom", cycle_max_mom, count)
        self.decay_mom_rate = _number("decay_mom_rate", decay_mom_rate)
        self.cycle_momentum = _boolean("cycle_momentum", cycle_momentum)
        if self.cycle_momentum and any("betas" not in group for group in self.optimizer.param_groups):
            name = type(self.optimizer).__name__
            warnings.warn(f"OneCycle: {name} has no betas, so cycle_momentum has no effect", stacklevel=2)
            self.cycle_momentum = False
        self._begin()

    def lrs_at(self, iteration: int) -> list[float]:
        """Return the learning rate of each parameter group at an iteration."""
        if iteration >= self.cycle_size:
            factor = decay_factor(iteration - self.cycle_size + 1, self.decay_step_size, self.decay_lr_rate)
            return [low / factor for low in self.min_lrs]
        height = self._height(iteration)
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def moms_at(self, iteration: int) -> list[float]:
        """Return the first beta of each parameter group at an iteration."""
        if iteration >= self.cycle_size:
            factor = decay_factor(iteration - self.cycle_size + 1, self.decay_step_size, self.decay_mom_rate)
            return [high * factor for high in self.max_moms]
        height = self._height(iteration)
        return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each parameter group at this iteration; None if momentum is not cycled."""
        return [(mom, 0.99) for mom in self.moms_at(self.last_batch_iteration)] if self.cycle_momentum else None

    def _height(self, iteration: int) -> float:
        return cycle_height(iteration, self.first_step_size, self.second_step_size, *self.stair_counts)

    def _write(self) -> None:
        super()._write()
        if self.cycle_momentum:
            moms = self.min_moms if self.last_batch_iteration == -1 else self.moms_at(self.last_batch_iteration)
            for group, mom in zip(self.optimizer.param_groups, moms, strict=True):
                group["betas"] = (mom, 0.99)


class LRRangeTest(Schedule):
    """A rate that grows steadily, or in stairs: the run shows where training breaks.

    By `lr_range_test_step_rate` times the min rate every `lr_range_test_step_size` iterations.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | list[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        count = len(self.optimizer.param_groups)
        self.min_lrs = _per_group("lr_range_test_min_lr", lr_range_test_min_lr, count)
        self.step_size = _integer("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = _boolean("lr_range_test_staircase", lr_range_test_staircase)
        self._begin()

    def lrs_at(self, iteration: int) -> list[float]:
        """Return the learning rate of each parameter group at an iteration."""
        factor = range_test_factor(iteration, self.step_size, self.step_rate, self.staircase)
        return [low * factor for low in self.min_lrs]


_OURS = {cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)}


def _torch_schedules() -> dict[str, type]:
    base = torch.optim.lr_scheduler.LRScheduler
    public = inspect.getmembers(torch.optim.lr_scheduler, inspect.isclass)
    return {name: c for name, c in public if issubclass(c, base) and c is not base and name[0] != "_"}


def schedules() -> list[str]:
    """Return every name that `scheduler.type` may have: ours first, then torch's."""
    return [*_OURS, *(name for name in _torch_schedules() if name not in _OURS)]


def _hint(word: str, choices: list[str]) -> str:
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean '{by_lower[near[0]]}'?" if near else "."


def _check_names(kind: str, cls: type, params: Mapping[str, Any]) -> None:
    """Raise for a key that the schedule does not have, and for one that it needs and did not get."""
    wanted = list(inspect.signature(cls).parameters.values())[1:]  # the first is the optimizer
    names = [parameter.name for parameter in wanted]
    for key, value in params.items():
        if key not in names:
            raise ValueError(
                f"scheduler.params.{key}: {kind} has no such parameter (got {value!r}){_hint(key, names)} "
                f"It has: {', '.join(names)}"
            )
    for parameter in wanted:
        if parameter.default is inspect.Parameter.empty and parameter.name not in params:
            given = ", ".join(params) or "none"
            raise ValueError(f"scheduler.params.{parameter.name}: {kind} needs it; given: {given}")


def build_scheduler(optimizer: Any, type: str, params: Mapping[str, Any] | None = None) -> Any:
    """Return the scheduler of the JSON section `scheduler`; a ValueError names the path of what is wrong.

    Args:
        optimizer: a torch optimizer, or a wrapper that has it as `.optimizer`.
        type: one of `schedules()`: ours by name, else `torch.optim.lr_scheduler.<type>`.
        params: keyword arguments of the schedule, as they stand in the JSON.
    """
    cls = _OURS.get(type) or _torch_schedules().get(type)
    if cls is None:
        hint, known = _hint(str(type), schedules()), ", ".join(schedules())
        raise ValueError(f"scheduler.type: unknown schedule {type!r}{hint} There are: {known}")
    params = params or {}
    _check_names(type, cls, params)
    try:
        return cls(_basic_optimizer(optimizer), **params)
    except ScheduleError as error:
        raise ValueError(f"scheduler.params.{error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"scheduler.params: {type} did not accept {params!r}: {error}") from error
