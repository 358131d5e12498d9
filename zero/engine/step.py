"""The order of events of a training step.

forward     inputs are cast; hooks gather each unit's parameters before its modules run and release them after
backward    the loss is scaled; hooks gather the parameters again; gradients are reduced as they become complete:
            those of the micro-batch at the accumulation boundary, or of each one where gradients are sharded
step        before the boundary the micro-batch is counted, and that is all; at the boundary:
            1. the replicas are compared, every `zero.check_replicas` steps
            2. the optimizer: what was not reduced yet, the global norm, overflow, clipping, the update of each
               unit, the gather of parameters that stay gathered, which may still run, the loss scale
               or nothing of it but the norm, where the alarm says so; with local SGD the mean of replicas, if due
            3. the counters, the profiles
            4. what came of it (`TrainingStep._conclude`): the ranks' reports, which came with the norm: losses that are
               not finite, equal batches; the monitors, the log; the scheduler, unless the step was skipped
            5. after the third step reality beside the plan (`zero.plan`)
            6. the error of a checkpoint that was written beside the training loop, if it failed; the alarm's own one

On a GPU the host does not wait for the norm: there 4 comes when the outcome of the step is asked for, or with the next
call of `step`, and so before the next update: rates and loss scales are those of a run that waits.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from zero.core.access import GatheredParameters
from zero.core.hooks import as_forward
from zero.core.micro_batches import Weighing, Weight
from zero.core.sharded_module import ShardedModule
from zero.core.weak import before_exit, while_alive
from zero.engine.accumulation import Accumulation
from zero.engine.alarm import Alarms
from zero.engine.checkpoint.save import CheckpointSaver
from zero.engine.precision import Precision, check_loss, scaled
from zero.engine.profiles import Profiles, asked
from zero.engine.randomness import Randomness
from zero.engine.reality import Reality
from zero.engine.recorder import StepRecorder, mean_loss
from zero.engine.replica_means import ReplicaMeans
from zero.engine.replicas import Replicas
from zero.engine.status import Status
from zero.log import logger, rank_zero
from zero.memory.streams import current_stream
from zero.monitor.comms import Traffic, table
from zero.monitor.step_record import StepRecord
from zero.optim.norm import RankReport
from zero.optim.optimizer import HeldOpen, ZeroOptimizer
from zero.parallel.experts.cutting import CutExperts
from zero.parallel.operators.cutting import CutOperators
from zero.parallel.shared import SharedSequences
from zero.parallel.tensor.cutting import CutModel
from zero.recompute.modules import Recomputing
from zero.watchdog.hang_report import Phase


class Forms(NamedTuple):
    """The division of a model's sequences, layers, experts and operators among ranks; None for what is not divided."""

    sharing: SharedSequences | None = None
    tensors: CutModel | None = None
    experts: CutExperts | None = None
    operators: CutOperators | None = None

    @property
    def alike(self) -> str | None:
        """Why ranks run equally many micro-batches, and what to do; None where they need not."""
        if self.operators is not None:
            return "operators are cut over all of them, so all run equally many, of equally many rows"
        if self.experts is not None:
            return (
                "tokens travel to experts of other ranks, so all run equally many; one that has no more runs the "
                "forward and the backward of an empty batch, of 0 rows"
            )
        return None

    def operators_uncut(self) -> contextlib.AbstractContextManager[None]:
        """Inside, each rank may call the model as often as it likes."""
        return contextlib.nullcontext() if self.operators is None else self.operators.uncut()

    @property
    def divisions(self) -> list[CutModel | CutExperts | CutOperators]:
        """All but that of sequences."""
        return [each for each in (self.tensors, self.experts, self.operators) if each is not None]


class TrainingStep:
    """Runs forward, backward and step over the parts of an engine."""

    def __init__(
        self,
        sharded: ShardedModule,
        optimizer: ZeroOptimizer | None,
        device: torch.device,
        recomputing: Recomputing,
        accumulation: Accumulation,
        saving: CheckpointSaver,
        status: Status,
        forms: Forms,
    ) -> None:
        config = accumulation.config
        every = config.zero.check_replicas
        self.recomputing = recomputing
        self.recorder = StepRecorder(config, sharded, optimizer, status, forms.experts)
        self.forms = forms
        self.means = ReplicaMeans(config, sharded, optimizer)
        self.randomness: Randomness | None = None
        if sharded.numerics.tree or forms.tensors is not None:
            self.randomness = Randomness(sharded.world, device, sharded.meshes.apart)
        self.replicas = Replicas(sharded, optimizer, every) if every and optimizer is not None else None
        self.alarms = Alarms(config.zero.alarm) if config.zero.alarm.model_fields_set else None
        self.profiles: Profiles | None = None
        if optimizer is not None and asked(config):
            self.profiles = Profiles(config, sharded, self.recorder)
        planned = config.zero.plan and optimizer is not None
        self.reality = Reality(config, sharded, optimizer) if planned else None
        self.model = sharded.module
        self._sharded = sharded
        self._weighing = Weighing(config)
        self._optimizer = optimizer
        self._precision = Precision(config, device)
        self._accumulation = accumulation
        self._saving = saving
        self._status = status
        sharded.reducer.on_flush.append(recomputing.backward_ended)
        if forms.sharing is not None:
            sharded.reducer.on_flush.append(forms.sharing.ended)
        if optimizer is not None:
            before_exit(self, while_alive(self.conclude))  # a program may ask for nothing more

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped model.

        An exception, Ctrl-C included, leaves the engine usable: the gradients of this step are dropped, and its
        micro-batches are counted from the first again. The same holds for `backward`.

        With `sequence_parallel_size` all ranks that share a sequence call it with the whole one, labels included. The
        model runs on this rank's piece; a loss is the mean over the batch of all of them, and outputs are of the piece.
        """
        if self._sharded.module.training and torch.is_grad_enabled():
            self.recorder.batch((inputs, kwargs))
            self._weighing.forward(kwargs)
        if self.forms.tensors is not None:
            inputs, kwargs = self.forms.tensors.begin(inputs, kwargs)
        model = self.model
        if self.forms.sharing is not None:
            model = functools.partial(self.forms.sharing.run, model, self._begins_first)
        if self.forms.operators is not None:
            model = functools.partial(self.forms.operators.run, model)
        return self.run(model, inputs, kwargs)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module's `generate` as its forward: parameters that it reads itself are gathered until its end.

        Where parameters are resharded, or experts divided, all ranks must call it, and Hugging Face's own is told
        `synced_gpus=True`, unless the caller says otherwise: a rank whose text ends early goes on until all have ended,
        and none waits for another.
        Raises AttributeError where the module has none.
        """
        self._status.check()
        module = self._sharded.module
        method = getattr(module, "generate", None)
        if method is None:
            raise AttributeError(f"the module of this engine, a {type(module).__name__}, has no method 'generate'")
        together = (self._sharded.sharding.params and not self._status.generating) or self.forms.experts is not None
        if self._sharded.world.size > 1 and together and _knows_synced_gpus(module, method):
            kwargs.setdefault("synced_gpus", True)
        with self.forms.operators_uncut():
            return self.run(functools.partial(as_forward, module, method), inputs, kwargs)

    @contextlib.contextmanager
    def gathered_for_generation(self) -> Iterator[Any]:
        """Inside, all parameters are whole and no hook of ours is on the module, which it gives: a plain one then.

        For `generate`, which reads all parameters for each token: they are gathered once. Each rank may then call the
        module as often as it likes. A collective on entering and on leaving. There must be room for the whole model on
        each device. Blocks may be nested; the outermost gathers and releases, with an exception, too. Parameters are
        only read: a change raises RuntimeError on leaving, as in `GatheredParameters`. So does `step()` inside, and
        entering from inside a forward or a backward.
        """
        self._status.check()
        sharded, status = self._sharded, self._status
        if status.generating:
            yield sharded.module
            return
        if sharded.prefetcher.inside:
            raise RuntimeError(
                "gathered_for_generation() inside a forward or a backward of the model; call it between them"
            )
        with GatheredParameters(sharded.module.parameters()), self.forms.operators_uncut():
            hooked = sharded.hooked
            sharded.unhook(hooked)
            status.generating = True
            try:
                yield sharded.module
            finally:
                status.generating = False
                if not status.destroyed:
                    sharded.hook(hooked)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        tokens: float | torch.Tensor | None = None,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """Compute and reduce gradients; returns loss / gradient_accumulation_steps for logging, detached.

        `scale_wrt_gas=False` says that the caller has already divided the loss. `tokens`: how many this rank's
        micro-batch has, for the log to say tokens/s; a tensor [] is read at the step only. With `"zero": {"mean":
        "tokens"}` it is how many of them the loss counts, perhaps 0, and read at once; the loss is their mean, or with
        `reduction="sum"` their sum, and what is returned is the loss itself, as with a step that the script ends.
        Raises ValueError for a loss that is not a scalar with a graph, RuntimeError without an optimizer.
        """
        self._status.check()
        if self._optimizer is None:
            raise RuntimeError("backward() needs an optimizer: give `optimizer` in the JSON or to initialize()")
        check_loss("backward()", loss)
        steps = self._accumulation.config.gradient_accumulation_steps
        reducer = self._sharded.reducer
        rounds = reducer.rounds
        weight = self._weighing.weight(tokens, reduction, not scale_wrt_gas and bool(reducer.weights.counts))
        times = 1 if scale_wrt_gas or self._weighing.items is not None else steps
        try:
            with self._sharded.world.watchdog.call(Phase.BACKWARD), self.recorder.phase("backward"):
                self.scaled(loss, times, weight).backward(retain_graph=retain_graph)
                if reducer.rounds == rounds:
                    # No parameter of ours was in the graph here; other ranks may have some and wait for us.
                    reducer.flush()
        except BaseException:
            self.abandon()
            raise
        self._note(loss, weight, times, tokens)
        return loss.detach() / steps if times == 1 and not self._accumulation.config.counted else loss.detach()

    def scale(
        self, loss: torch.Tensor, *, tokens: float | torch.Tensor | None = None, reduction: str = "mean"
    ) -> torch.Tensor:
        """The loss times the loss scale, for `engine.scale(loss).backward()`; outside fp16 the loss itself.

        `tokens`, `reduction`: as in `backward`. Raises ValueError for a loss that is not a scalar with a graph.
        """
        self._status.check()
        check_loss("scale()", loss)
        weight = self._weighing.weight(tokens, reduction, False)
        self._note(loss, weight, 1, tokens)
        return self.scaled(loss, 1, weight)

    def weight_of(self, tokens: float | torch.Tensor | None) -> Weight:
        """The weight of a micro-batch of a schedule, whose loss is the mean over `tokens`."""
        return self._weighing.weight(tokens, "mean", False)

    def scaled(self, loss: torch.Tensor, times: float, weight: Weight) -> torch.Tensor:
        """The scaled loss of a micro-batch: see `scaled`."""
        reducer = self._sharded.reducer
        if not reducer.weights.needed:
            return scaled(loss, times, reducer)
        return scaled(loss, times, reducer, weight._replace(factor=weight.factor / self._optimizer.weight_unit))

    def _note(self, loss: torch.Tensor, weight: Weight, times: int, tokens: float | torch.Tensor | None) -> None:
        """Record a backward of `times` this loss."""
        if self.forms.tensors is not None:
            self.forms.tensors.see(loss)
        config = self._accumulation.config
        share = weight.factor if config.counted else 1 / config.gradient_accumulation_steps
        if tokens is not None:  # every rank that shares them, as along tp, says all
            shares = self.forms.sharing is not None and self.forms.sharing.cuts
            tokens = tokens / config.grid.size("tp") / (config.sequence_parallel_size if shares else 1)
        self.recorder.backward(loss, times * share, 0.0 if tokens is None else tokens, weight.count)

    def step(self, scheduler: Any, lr_kwargs: dict[str, Any], partial: bool) -> None:
        """See `Engine.step`."""
        self._status.check()
        self._status.check_outside("step()")
        self._sharded.check_parameters()
        if self._optimizer is None:
            raise RuntimeError("step() needs an optimizer: give `optimizer` in the JSON or to initialize()")
        if isinstance(scheduler, ReduceLROnPlateau) and "metrics" not in lr_kwargs:
            raise ValueError("step(): ReduceLROnPlateau wants step(lr_kwargs={'metrics': ...}) at every boundary")
        self._optimizer.conclude()
        self._status.step_applied = False
        with self._accumulation.ending_micro_batch(partial) as boundary:
            if boundary:
                self._update()
                if not self._accumulation.config.managed_gradient_accumulation:
                    self._accumulation.count_samples(self._optimizer.reports)
                self._status.global_steps += 1
                self._status.global_samples += self._accumulation.samples
                if self.profiles is not None:
                    self.profiles.step_ended(self._status.global_steps)
                record = self.recorder.step_ended(self._accumulation.samples)
                this = weakref.ref(self)  # the optimizer may keep it for a while
                self._optimizer.after_step(lambda reports: this()._conclude(record, reports, scheduler, lr_kwargs))
                if self.reality is not None and self.reality.after_step():
                    self.reality = None
        if boundary:
            self._saving.raise_failure()
            if self.alarms is not None:
                self.alarms.save(self._saving.save_checkpoint)
            self._saving.end_at_signal()

    def conclude(self) -> None:
        """At the end, report the last step, and whether there was any."""
        self._optimizer.conclude()
        if not self._status.global_steps and sys.exc_info()[0] is None:
            self._accumulation.warn_of_no_step()

    def log_comms_summary(self, by_unit: bool = False) -> dict[str, Traffic]:
        """The messages that this rank has sent so far, by operation or by unit; rank 0 prints it, too.

        Raises RuntimeError without `comms_logger.enabled` in the JSON.
        """
        log = self.profiles.comms if self.profiles is not None else None
        if log is None:
            raise RuntimeError("log_comms_summary(): nothing was noted; set comms_logger.enabled to true in the JSON")
        traffic = log.traffic(by_unit)
        rank_zero(logging.INFO, "%s", table(traffic, "unit" if by_unit else "operation"))
        return traffic

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those of earlier micro-batches. Not needed in a training loop."""
        self._sharded.reducer.drop()
        self.recorder.clear()
        for param in self._sharded.module.parameters():
            param.grad = None

    def run(self, call: Callable[..., Any], inputs: Any, kwargs: Any) -> Any:
        """Call the model, or a part of it, as a forward."""
        self._status.check()
        if self._sharded.recover():
            self._accumulation.restart()
            self.recorder.clear()
        if torch.is_grad_enabled():
            self._accumulation.begin_forward()
            self._sharded.prefetcher.stream = current_stream(self._sharded.device)
        watched, timed = self._sharded.world.watchdog.call(Phase.FORWARD), self.recorder.phase("forward")
        try:
            with watched, timed, self._precision.forward(), self._seeded(), self.recomputing.scope():
                inputs, kwargs = self._precision.cast((inputs, kwargs))
                if self.forms.alike is not None:
                    self._begins_first()  # also where no parameter is gathered: tokens wait for those of all ranks
                output = call(*inputs, **kwargs)
            self._sharded.world.watchdog.status.forwards += torch.is_grad_enabled()
            return output
        except BaseException as error:
            self.abandon()
            why = self._precision.mixed(error, self._sharded.module)
            if why is None and self.forms.tensors is not None:
                why = self.forms.tensors.misfit(error)
            if why is not None:
                raise RuntimeError(why) from error
            raise

    def _begins_first(self) -> bool:
        """Begin the micro-batch of a forward, so that idle ranks follow; whether no rank has run a backward yet."""
        if torch.is_grad_enabled() and self._sharded.prefetcher.on_forward is not None:
            self._sharded.prefetcher.on_forward()
        return not self._sharded.reducer.rounds

    def _seeded(self) -> contextlib.AbstractContextManager[None]:
        if self.randomness is None or not self._sharded.module.training:
            return contextlib.nullcontext()
        return self.randomness.forward(self._status.global_steps, self._sharded.reducer.leaf.micro_batch)

    def _update(self) -> None:
        """The optimizer's step."""
        self._sharded.recover()
        try:
            with self._sharded.world.watchdog.call(Phase.STEP), self.recorder.phase("step"):
                if self.replicas is not None:
                    self.replicas.before_step(self._status.global_steps + 1)
                self._accumulation.join()
                for form in self.forms.divisions:
                    form.before_step()
                more, counts = self._accumulation.more, self._sharded.reducer.weights.counts
                report = self.recorder.report(more, counts if self._accumulation.config.counted else None)
                report = self._saving.signals.said(report)
                self._optimizer.update(report, None if self.alarms is None else self._is_unwanted, more)
                self.means.step_ended(self._status.global_steps + 1)
                self.recomputing.after_step(self._sharded.world)
        except HeldOpen:
            raise  # the gradients are there for the step outside of the block
        except BaseException as error:
            self._update_failed(error)
            raise

    def _is_unwanted(self, reports: Mapping[int, RankReport]) -> bool:
        return self.alarms.skips(self._status.global_steps + 1, mean_loss(reports), self._optimizer.grad_norm)

    def _update_failed(self, error: BaseException) -> None:
        optimizer, steps = self._optimizer, self._status.global_steps
        if not optimizer.updating:
            self.abandon()
            return
        how = f"{type(error).__name__}: {error}" if optimizer.failure is None else str(optimizer.failure)
        self._status.set_half_updated(f"step {steps + 1} ended on rank {self._sharded.world.global_rank} with {how}")

    def _conclude(
        self, record: StepRecord, reports: Mapping[int, RankReport], scheduler: Any, lr_kwargs: dict[str, Any]
    ) -> None:
        """The outcome of the last step is known: report it."""
        status, skipped = self._status, self._optimizer.skipped
        status.step_applied = not skipped
        status.skipped_steps += skipped
        self.recorder.conclude(record, reports)
        self._saving.signals.hear(reports)
        if scheduler is not None and not skipped:
            self.recorder.step_scheduler(scheduler, lr_kwargs)

    def abandon(self) -> None:
        """Drop the gradients of this step after an exception, which must not be hidden by another."""
        try:
            self._sharded.abandon()
        except RuntimeError as error:
            if str(error) != self._sharded.world.watchdog.status.gave_up:  # else it is the exception on its way
                logger.warning("after an exception the engine could not be made usable: %s", error)
        self._accumulation.restart()
        self.recorder.clear()
        if self.forms.sharing is not None:
            self.forms.sharing.ended()


def _knows_synced_gpus(module: nn.Module, generate: Callable[..., Any]) -> bool:
    """Whether a module's `generate`, or that of a submodule which it hands its keywords to, takes `synced_gpus`."""
    parameters = inspect.signature(generate).parameters
    if "synced_gpus" in parameters or all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
        return "synced_gpus" in parameters
    methods = (getattr(each, "generate", None) for each in module.modules() if each is not module)
    return any("synced_gpus" in inspect.signature(method).parameters for method in methods if callable(method))


# Reading order, 9 of 9; the first is zero/plan/layout.py.
