"""The optimizer that users hold: their parameter groups outside, units and shards inside."""

from __future__ import annotations

import inspect
import logging
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from zero.core.agree import agree
from zero.core.finite import ALL_FINITE
from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit
from zero.core.weak import while_alive
from zero.deepspeed_names import instead
from zero.kernels import cuda
from zero.log import rank_zero
from zero.optim.norm import RankFlags, RankReport, exact_norm, flags_of, global_norm, hosts_connected
from zero.optim.outcome import Numbers, Outcome
from zero.optim.scaler import LossScaler
from zero.optim.shard_optimizer import ShardOptimizer
from zero.optim.updates import Around, UnitUpdater
from zero.watchdog.hang_report import ranks_text


class HeldOpen(RuntimeError):
    """A step was called inside `GatheredParameters`. Nothing has changed, and it may be called outside."""


class _Last(NamedTuple):
    """The host's values of the last step."""

    grad_norm: float | None = None
    overflow: bool = False
    skipped: bool = False
    reports: Mapping[int, RankReport] = {}


class ZeroOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` over the model's own parameters that updates shards.

    `param_groups` hold the module's parameters and the hyperparameters; change them freely, as torch's schedulers do.
    On a GPU whose kernels decide by themselves whether a step is skipped, `update` waits for nothing: the host reads
    the outcome when it is asked for, or at the next step (`conclude`).

    average: the factor from sums of gradients to the averaged, unscaled ones of the last step; None if it was skipped.
    states: what `shard_optimizer` keeps of each unit.
    whole_step: the engine's `step()`, which `step()` here calls; set by the engine. client: the optimizer that the
    script passed, whose own `step()` raises as long as the engine exists.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        shard_optimizer: ShardOptimizer,
        clipping: float,
        check_overflow: bool,
        loss_scaler: LossScaler | None = None,
        client: torch.optim.Optimizer | None = None,
    ) -> None:
        self.shard_optimizer, self.states = shard_optimizer, shard_optimizer.states
        self.loss_scaler = loss_scaler or LossScaler()
        self.clipping = clipping
        self._check_overflow = check_overflow
        self.away = False  # the engine keeps state in host memory
        self._sharded: ShardedModule | None = None
        self._mean, self._deferring = 1.0, False
        self._counted = False  # it is divided at the step by what the micro-batches count
        self._last = _Last()
        self._pending: Outcome | None = None  # of the last step, until the host has read it; `_then` runs after that
        self._then: Callable[[Mapping[int, RankReport]], None] | None = None
        self.average: float | torch.Tensor | None = None
        self._updating = False
        self._updater: UnitUpdater | None = None
        self.whole_step: Callable[[], None] | None = None
        if client is not None:
            client.register_step_pre_hook(_refusal(weakref.ref(self)))
        super().__init__(groups, dict(shard_optimizer.defaults))

    def bind(self, sharded: ShardedModule, mean: float, counted: bool = False) -> None:
        """Attach the units. `mean` turns the sum over ranks and micro-batches into their average; collective.

        It is one for all units, whoever shares them: the gradient of each is a sum over all samples of a step.

        `counted`: it is still to be divided by what the micro-batches of a step count, over all ranks.
        """
        self._sharded, self._counted, self._mean = sharded, counted, mean
        for unit in sharded.trained:
            unit.optimizer = weakref.ref(self)
        this = weakref.ref(self)
        sharded.reducer.loss_scale = lambda: getattr(this(), "loss_scale", 1.0)
        if self._updater is None:
            self._updater = UnitUpdater(self.shard_optimizer, sharded, self.param_groups)
            self._deferring = all(agree(self._could_defer, sharded.world))
        sharded.reducer.on_last = while_alive(self._updater.bring_ahead)
        sharded.reducer.finite.enabled = self._check_overflow and not self._deferring

    @property
    def updating(self) -> bool:
        """Whether some weights are new and others old: inside a step, and for ever after one that failed half-way."""
        return self._updating or self.failure is not None

    def around_updates(self, around: Around | None) -> None:
        """Run the update of each unit in the context `around(unit, gradient)`, on the thread that updates it."""
        self._updater.around = around

    @property
    def failure(self) -> RuntimeError | None:
        """The error of a failed update beside the training loop, with unit, rank and cause; or None."""
        return self._updater.failure if self._updater is not None else None

    @property
    def host_threads(self) -> int:
        """The number of threads of the host's updates; 0 if the host updates nothing."""
        return self._updater.threads if self._updater is not None else 0

    def settle(self) -> None:
        """Wait until no update runs beside the loop; raises the error of a failed one."""
        for unit in self._sharded.trained if self._sharded is not None else ():
            unit.shard.settle()

    def finish(self) -> None:
        """Wait for the last update, whether it fails or not, and take no more steps."""
        if self._updater is not None:
            self._updater.close()
            for unit in self._sharded.trained:
                unit.shard.abandon_update()

    def waited(self) -> float | None:
        """Seconds that the training loop has waited for updates since the last call; None if none run beside it."""
        return self._updater.waits.take() if self._updater is not None and self._updater.threaded else None

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        self.conclude()
        return self._last.overflow

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped at all."""
        self.conclude()
        return self._last.skipped

    @property
    def grad_norm(self) -> float | None:
        """L2 norm of the last step's averaged gradient before clipping; None before the first step."""
        self.conclude()
        return self._last.grad_norm

    @property
    def reports(self) -> Mapping[int, RankReport]:
        """The reports of all ranks on the last step."""
        self.conclude()
        return self._last.reports

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss; 1 outside fp16."""
        if self.loss_scaler.dynamic:
            self.conclude()
        return self.loss_scaler.loss_scale

    cur_scale = loss_scale  # DeepSpeed's other name

    @property
    def weight_unit(self) -> float:
        """The divisor of the weights of the next losses; see `LossScaler.weigh`."""
        if self.loss_scaler.unit is not None:
            self.conclude()
        return self.loss_scaler.unit or 1.0

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.loss_scaler.dynamic

    _global_grad_norm = grad_norm  # DeepSpeed's name

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use this loss scale from now on, dynamic or not; all ranks must call it.

        Raises ValueError for one that is not positive and finite, RuntimeError between the first backward and the step
        of an accumulation window, whose gradients were multiplied by the old one.
        """
        if self._sharded is None:
            raise RuntimeError("this optimizer is not attached to an engine")
        if self._sharded.reducer.finite.backwards:
            raise RuntimeError(
                "override_loss_scale(): gradients are there that were multiplied by the old loss scale; "
                "call it after step(), before the next backward"
            )
        self.conclude()
        self.loss_scaler.force(loss_scale)

    def factor_of(self, unit: Unit, together: bool = False) -> float:
        """The factor from the sums in `unit.gradients` to the averaged, unscaled gradient.

        `together`: all ranks ask, so it may be a collective. RuntimeError without, where only all ranks together know
        what their micro-batches count.
        """
        if not self._counted:
            return self._unscaled(self._mean)
        if not together:
            raise RuntimeError(
                "the mean of this gradient is over what the micro-batches of all ranks count (zero.mean, or "
                "managed_gradient_accumulation false), which one rank does not know; read it by "
                "zero.utils.safe_get_full_grad on all ranks"
            )
        count = sum(agree(sum(self._sharded.reducer.weights.counts), self._sharded.world)) / self._repeats
        return self._unscaled(self._mean) / count if count else 0.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError once the parameters are resharded; before, as in torch."""
        if getattr(self, "_sharded", None) is not None:
            raise RuntimeError(
                "add_param_group(): the parameters are cut into units for the groups that initialize() got; "
                "give all groups to initialize(), those to be trained later with lr 0"
            )
        # Unwrapped: torch's wrapper only keeps the compiler out, and imports it for that, which takes over a second.
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """Raise RuntimeError: the state is in shards, which one rank's dictionary cannot hold."""
        raise RuntimeError(
            "optimizer.state_dict(): each rank has a shard of the state; engine.save_checkpoint() saves all of it, "
            "zero.utils.safe_get_full_optimizer_state reads it parameter by parameter"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise RuntimeError: see `state_dict`."""
        raise RuntimeError(
            "optimizer.load_state_dict(): each rank has a shard of the state; "
            "engine.load_checkpoint() loads all of it, zero.utils.safe_set_full_optimizer_state writes it parameter by "
            "parameter"
        )

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        self.conclude()  # the engine's scheduler steps behind it
        return [group["lr"] for group in self.param_groups]

    def set_lr(self, lr: float) -> None:
        """Give all parameter groups one learning rate; a scheduler overwrites it at its next step."""
        for group in self.param_groups:
            group["lr"] = lr

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError; for DeepSpeed's names, with what to use instead."""
        raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'{instead(f'optimizer.{name}')}")

    def unbind(self, wait: bool = True) -> None:
        """Drop the units and all state; `step()` raises from now on.

        Without `wait`, updates that still run end by themselves, and the state is freed with this object.
        """
        if wait:
            self.finish()
        self._sharded = self._updater = self.whole_step = self._pending = self._then = None
        if wait:
            self.states.forget()

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """The same as `engine.step()`, for training loops that call the optimizer."""
        if closure is not None:
            raise ValueError("step() takes no closure: the gradients are reduced before it is called")
        if self.whole_step is None:
            raise RuntimeError("this optimizer is not attached to an engine")
        self.whole_step()

    step.hooked = True  # torch runs a step's hooks around `update`, so not around this method

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def update(
        self,
        report: RankReport,
        unwanted: Callable[[Mapping[int, RankReport]], bool] | None = None,
        more: float = 1.0,
    ) -> None:
        """Update every trained unit once, and send the new parameters to the ranks that keep them; collective.

        If a gradient is inf or NaN, the step is skipped, with `overflow` set and the parameter named (or its unit, if
        the host does not wait). The gradients are consumed either way. `report`, this rank's for `after_step`, is sent
        with the norm. `unwanted` decides from all reports and `grad_norm` whether to skip the step too, alike on all
        ranks; the host waits for it. `more`: the mean is so many times larger, as the step has fewer micro-batches.
        Raises RuntimeError, on all ranks, if a dynamic loss scale cannot be halved any more;
        HeldOpen, on all ranks and with the gradients kept, while GatheredParameters holds resharded parameters.
        """
        sharded = self._sharded
        self._opt_called = True  # a scheduler would warn that it is stepped before this is
        self.average = None
        if self.away:
            raise RuntimeError("step(): states are offloaded; call engine.reload_states() first")
        sharded.reducer.before_step()  # before the norm, and on all ranks: some may lack gradients that others have
        sharded.check_order()
        defers = self._deferring and unwanted is None
        held = [unit.plan.name for unit in sharded.trained if unit.resharded and unit.holds]
        flags = RankFlags.LATE_GRADIENTS if sharded.reducer.late else RankFlags(0)
        flags |= RankFlags.GATHERED_PARAMETERS if held else RankFlags(0)
        flags |= RankFlags.BACKWARD if sharded.reducer.weights.counts else RankFlags(0)
        report = report._replace(flags=report.flags | flags)
        outcome = self._outcome(report, more)
        known = {} if defers else outcome.numbers.reports
        flags = flags_of(report, sharded.world) if defers else {rank: each.flags for rank, each in known.items()}
        if ranks := [rank for rank, each in flags.items() if RankFlags.GATHERED_PARAMETERS in each]:
            there = f"{ranks_text(ranks)}{f'; here {held}' if held else ''}"
            raise HeldOpen(f"step() while GatheredParameters holds parameters open ({there}); step outside of it")
        if any(RankFlags.LATE_GRADIENTS in each for each in flags.values()):
            sharded.reducer.end(force=True)
            outcome = self._outcome(report, more)
        if self._counted and not any(RankFlags.BACKWARD in each for each in flags.values()):
            raise RuntimeError("step() without a backward since the last step(), on all ranks")
        if defers:
            self._update(outcome.factor, outcome.mean)
            sharded.reducer.drop()
            self._pending = outcome
        else:
            self._end(outcome, unwanted)

    def conclude(self) -> None:
        """Read the outcome of the last step, unless that is done, and apply its consequences; waits for the device.

        Raises RuntimeError if a dynamic loss scale cannot be halved any more.
        """
        outcome, self._pending = self._pending, None
        if outcome is None:
            return
        then, self._then = self._then, None
        numbers, sharded = outcome.numbers, self._sharded
        self._take(numbers)
        if self._last.overflow:
            self.shard_optimizer.take_back(sharded.trained)
            names = [f"a gradient in unit '{name}' is not finite" for name in sharded.table.names]
            self._skip([*names, ALL_FINITE][numbers.bad])
        else:
            self.loss_scaler.update(False)
        if then is not None:
            then(numbers.reports)

    def after_step(self, then: Callable[[Mapping[int, RankReport]], None]) -> None:
        """Call `then` with the reports of all ranks once the outcome of the last `update` is known."""
        if self._pending is None:
            then(self._last.reports)
        else:
            self._then = then

    def forget_last_step(self) -> None:
        """Forget the last step, because a checkpoint was loaded."""
        self._last = self._last._replace(overflow=False, skipped=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those accumulated by earlier micro-batches of this step."""
        if self._sharded is not None:
            self._sharded.reducer.drop()

    def nbytes(self) -> int:
        """Bytes of optimizer state on this rank's device, without masters; `offload.host` counts the others."""
        trained = self._sharded.trained if self._sharded is not None else []
        here = [unit for unit in trained if not unit.shard.placement.state_offloaded]
        return sum(self.states.nbytes(unit, self.param_groups[unit.plan.group]) for unit in here)

    @property
    def _could_defer(self) -> bool:
        """Whether the host need not wait for a step: only kernels, no host thread, use its factor and skip it."""
        sharded = self._sharded
        kernels = bool(sharded.table.names) and cuda.kernels(sharded.device) is not None
        decides = kernels and self.shard_optimizer.factor_on_device and not self._updater.threaded
        return decides and not sharded.numerics.tree and hosts_connected(sharded.world)

    def _unscaled(self, mean: float) -> float:
        reducer = self._sharded.reducer
        return mean * reducer.divisor / reducer.scale * self.weight_unit

    def _outcome(self, report: RankReport, more: float) -> Outcome:
        sharded = self._sharded
        norm_of = exact_norm if sharded.numerics.tree else global_norm
        norm = norm_of(sharded, report)
        mean: float | torch.Tensor = self._unscaled(self._mean) * more
        if self._counted:
            count = norm.count / self._repeats
            mean = torch.where(count > 0.0, mean / count, 0.0)  # nothing was counted: the gradient is zero
        return Outcome(norm, mean, self.clipping, self._check_overflow, sharded.world)

    @property
    def _repeats(self) -> int:
        """The number of ranks that have the same micro-batches, and gradients that are not added up."""
        return self._sharded.world.size // self._sharded.meshes.sizes[1]

    def _take(self, numbers: Numbers) -> None:
        overflow = self._check_overflow and not math.isfinite(numbers.norm)
        self._last = _Last(numbers.norm, overflow, overflow, numbers.reports)
        known = numbers.reports.values()
        self.loss_scaler.weigh(sum(each.count for each in known), sum(each.backwards for each in known))

    def _end(self, outcome: Outcome, unwanted: Callable[[Mapping[int, RankReport]], bool] | None) -> None:
        """End a step whose outcome the host knows before it updates anything."""
        reducer, numbers = self._sharded.reducer, outcome.numbers
        self._take(numbers)
        if self._last.overflow:
            place = reducer.finite.first()
            reducer.drop()
            self._skip(place)
            return
        if unwanted is not None and unwanted(numbers.reports):
            self._last = self._last._replace(skipped=True)
        else:
            self._update(numbers.factor, float(outcome.mean))
        reducer.drop()
        self.loss_scaler.update(False)

    def _skip(self, place: str) -> None:
        """Log which gradient was not finite, and lower the loss scale, if there is one."""
        self.average = None
        for unit in self._sharded.trained:
            unit.gradients.forget_error()
        try:
            change = self.loss_scaler.update(True)
        except RuntimeError as error:
            raise RuntimeError(f"{error} With loss scale {self.loss_scale:g}, {place}.") from None
        rank_zero(logging.WARNING, "step skipped: %s%s", place, f"; {change}" if change else "")

    def _update(self, factor: float | torch.Tensor, average: float | torch.Tensor) -> None:
        for group in self.param_groups:
            self.shard_optimizer.check(group)  # a wrong hyperparameter must not leave half of the units updated
        self._updating = True
        self._updater.run(self.param_groups, factor)
        self._updating, self.average = False, average


def _refusal(ours: weakref.ref[ZeroOptimizer]) -> Callable[..., None]:
    """The hook before the step of an optimizer passed by the script: it would see no gradient, and change nothing."""

    def refuse(client: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        made = ours()
        if made is not None and made.whole_step is not None:
            raise RuntimeError(
                f"{type(client).__name__}.step() of the optimizer that initialize() was given: it has no gradients and "
                "no state any more; call engine.step(), or step() of the optimizer that initialize() returned"
            )

    return refuse


# Reading order, 8 of 9; next: zero/engine/step.py, the order of events of a step.
