"""The engine that users hold: a module of a few parts; each method belongs to one of them."""

from __future__ import annotations

import functools
import logging
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from zero.config import Config
from zero.core.comm import Axis
from zero.core.released import UNCLIPPED
from zero.core.sharded_module import ShardedModule
from zero.core.weak import while_alive
from zero.data import Loader
from zero.data.loader import make_loader
from zero.deepspeed_names import instead
from zero.engine.accumulation import Accumulation
from zero.engine.check import in_process
from zero.engine.check.compare import Report
from zero.engine.checkpoint.load import CheckpointLoader
from zero.engine.checkpoint.save import CheckpointSaver
from zero.engine.compiling import BlockCompiler
from zero.engine.description import Description, describe
from zero.engine.forward_only import acting, retire
from zero.engine.getters import DeepSpeedGetters
from zero.engine.metrics import Metrics, print_on_first
from zero.engine.pipeline import Pipeline
from zero.engine.recorder import StepRecorder
from zero.engine.replica_means import ReplicaMeans
from zero.engine.state_offload import StateOffload
from zero.engine.status import Status
from zero.engine.step import Forms, TrainingStep
from zero.engine.weight_updates import WeightUpdates
from zero.engine.weights import Weights
from zero.log import counted, log_once, rank_zero
from zero.monitor.monitor import Monitor
from zero.optim.optimizer import ZeroOptimizer
from zero.parallel.pipeline.build import Pipelined
from zero.recompute.modules import Recomputing

P = ParamSpec("P")
R = TypeVar("R")
L = TypeVar("L", Loader, None)


def _method_of(
    part: str, method: Callable[Concatenate[Any, P], R], forward: bool = False, whole: bool = False
) -> Callable[Concatenate[Any, P], R]:
    """A method of the engine that is `method` of one of its parts, with its signature and docstring.

    `forward`: an engine that only runs forward may be asked for it, too; `whole`: replicas take their mean before it.
    """

    @functools.wraps(method)
    def call(engine: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        engine = acting(engine) if forward else engine
        engine._status.check_not_destroyed()
        if whole:
            engine._status.check()
            engine._training.means.average_replicas()
        return method(operator.attrgetter(part)(engine), *args, **kwargs)

    return call


class Engine(DeepSpeedGetters, nn.Module):
    """Wraps a model for training; made by `zero.initialize`.

        loss = engine(batch)
        engine.backward(loss)      # or loss.backward()
        engine.step()              # updates at the accumulation boundary, does nothing before it

    Gradients are the mean over ranks and micro-batches, divided exactly once: the division is one factor of
    the optimizer step, so it holds however the backward was called. Unknown attributes are looked up in the
    wrapped module. `zero.engine.step` has the order of events of a step.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        optimizer: ZeroOptimizer | None,
        config: Config,
        device: torch.device,
        recomputing: Recomputing,
        initialize: Callable[..., Any],
        data: Axis,
        forms: Forms,
        pipelined: Pipelined | None = None,
    ) -> None:
        super().__init__()
        self.module = sharded.module
        self.optimizer = optimizer
        self.lr_scheduler: Any = None
        self.training_dataloader: Loader | None = None
        self.device = device
        self.global_rank = sharded.world.global_rank
        self.world_size = sharded.world.size
        self._initialize = initialize  # makes the engines of check()
        self._status = status = Status(optimizer)
        self._accumulation = Accumulation(config, sharded, optimizer, status, forms.alike)
        self._saving = CheckpointSaver(self, config, sharded)
        self._loading = CheckpointLoader(self, sharded, optimizer, self._saving)
        self._weights = Weights(config, sharded, status, device)
        self._metrics = Metrics(data, device)
        self._offload = StateOffload(sharded, optimizer)
        self._compiler = BlockCompiler(sharded, status)
        parts = recomputing, self._accumulation, self._saving, status, forms
        self._training = TrainingStep(sharded, optimizer, device, *parts)
        if pipelined is not None:
            parts = self._training, self._accumulation, sharded, status, data
            self._training.model = Pipeline(pipelined, *parts)
        this = weakref.ref(self)
        for unit in sharded.units:
            unit.engine = this
        if optimizer is not None:  # through the engine, in front of whose methods a recorder may stand
            optimizer.whole_step = lambda: this().step()
        self._sharded: ShardedModule | None = sharded  # last: from here on there is something to destroy

    forward = _method_of("_training", TrainingStep.forward, forward=True)
    generate = _method_of("_training", TrainingStep.generate, forward=True)
    gathered_for_generation = _method_of("_training", TrainingStep.gathered_for_generation, forward=True)
    backward = _method_of("_training", TrainingStep.backward)
    scale = _method_of("_training", TrainingStep.scale)
    zero_grad = _method_of("_training", TrainingStep.zero_grad)

    log_comms_summary = _method_of("_training", TrainingStep.log_comms_summary)

    begin_step = _method_of("_accumulation", Accumulation.begin_step)
    set_gradient_accumulation_boundary = _method_of("_accumulation", Accumulation.set_gradient_accumulation_boundary)
    no_sync = _method_of("_accumulation", Accumulation.no_sync)
    coalesce_grad_reduction = _method_of("_accumulation", Accumulation.coalesce_grad_reduction)
    allreduce_gradients = _method_of("_accumulation", Accumulation.allreduce_gradients)
    set_train_batch_size = _method_of("_accumulation", Accumulation.set_train_batch_size)
    set_train_micro_batch_size = _method_of("_accumulation", Accumulation.set_train_micro_batch_size)

    save_checkpoint = _method_of("_saving", CheckpointSaver.save_checkpoint)
    save_on_signal = _method_of("_saving", CheckpointSaver.save_on_signal)
    wait_for_checkpoint = _method_of("_saving", CheckpointSaver.wait_for_checkpoint)
    load_checkpoint = _method_of("_loading", CheckpointLoader.load_checkpoint)
    take_weights = _method_of("_loading", CheckpointLoader.take_weights)

    module_state_dict = _method_of("_weights", Weights.module_state_dict, forward=True, whole=True)
    load_module_state_dict = _method_of("_weights", Weights.load_module_state_dict)
    stream_weights = _method_of("_weights", Weights.stream_weights, whole=True)
    weight_updates = _method_of("_weights.updates", WeightUpdates.weight_updates, whole=True)
    save_16bit_model = _method_of("_weights", Weights.save_16bit_model, whole=True)
    save_fp16_model = _method_of("_weights", Weights.save_fp16_model, whole=True)
    save_pretrained = _method_of("_weights", Weights.save_pretrained, whole=True)
    empty_partition_cache = _method_of("_weights", Weights.empty_partition_cache)
    _consolidated_16bit_state_dict = _method_of("_weights", Weights.consolidated_16bit_state_dict, whole=True)
    _zero3_consolidated_16bit_state_dict = _method_of("_weights", Weights.zero3_consolidated_16bit_state_dict)

    offload_states = _method_of("_offload", StateOffload.offload_states)
    reload_states = _method_of("_offload", StateOffload.reload_states)

    average_replicas = _method_of("_training.means", ReplicaMeans.average_replicas, whole=True)
    compile = _method_of("_compiler", BlockCompiler.compile)

    gather_for_metrics = _method_of("_metrics", Metrics.gather_for_metrics)
    reduce = _method_of("_metrics", Metrics.reduce)

    print = print_on_first
    log = _method_of("_recorder", StepRecorder.log)
    state_nbytes = _method_of("_recorder", StepRecorder.state_nbytes)
    host_nbytes = _method_of("_recorder", StepRecorder.host_nbytes)

    def step(self, lr_kwargs: dict[str, Any] | None = None, *, partial: bool = False) -> None:
        """End a micro-batch; at the accumulation boundary, update the model and step the scheduler.

        `partial`: here is the boundary, and the mean is over the micro-batches that there were, as behind a pass over
        the data that ends inside of a step; it may follow the `step()` of the last one. On all ranks alike.

        Raises RuntimeError, and changes nothing, where there was no backward since the last step. After an exception
        that came before the first weight was changed the engine is as after one in `backward`. After a later one the
        weights are half updated, and all that the engine still does is `destroy()`. Inside `GatheredParameters` of
        parameters that are resharded it raises on all ranks, and may be called again outside.
        """
        self._status.check_not_destroyed()
        # Released parameters see torch's clipping; of others their `grad` is read, which no engine is told of.
        caller = None if self.global_steps or self.gradient_clipping() else sys._getframe(1).f_code
        if caller is not None and "clip_grad_norm_" in caller.co_names:
            log_once(logging.WARNING, UNCLIPPED)
        self._training.step(self.lr_scheduler, lr_kwargs or {}, partial)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch that runs is the last of its optimizer step.

        With `managed_gradient_accumulation: false` every `step()` is, so it is true only while one runs.
        """
        return self._accumulation.is_boundary()

    @property
    def monitor(self) -> Monitor:
        """Where values of each step go; `write_events` writes others there, `add` adds a sink of the script's own."""
        self._status.check_not_destroyed()
        return self._recorder.monitor

    @property
    def is_compiled(self) -> bool:
        """Whether `compile()` has compiled a block."""
        self._status.check_not_destroyed()
        return self._compiler.is_compiled

    def deepspeed_io(
        self,
        dataset: Dataset | Sequence[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Iterable[Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Loader:
        """A loader that gives each rank its part of `dataset`, in micro-batches.

        route: "train" shuffles; "eval" and "predict" deal the samples out in their order, padded so that all ranks
        have as many. data_sampler: this rank's indices instead, taken as they are, or a `zero.TokenBatchSampler`.
        pin_memory counts on a GPU only; num_local_io_workers: None reads in this process.
        """
        self._status.check_not_destroyed()
        how = (batch_size, route, pin_memory, data_sampler, collate_fn, num_local_io_workers)
        return self._follow(make_loader(self._config, self.device, self._metrics.axis.rank, dataset, *how), route)

    def _follow(self, loader: L, route: str = "train") -> L:
        """Let the engine know the batches of a loader, if there is one, and the ends of its passes."""
        if loader is not None and route == "train":
            loader.on_end = while_alive(self._accumulation.pass_ended)
        return self._metrics.follow(loader)

    def check(
        self,
        batch: Any,
        steps: int = 3,
        stages: Sequence[int] = (0, 1, 2, 3),
        accumulations: Sequence[int] = (1, 2),
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        offload: bool = False,
    ) -> Report:
        """Train copies of the model under each stage and in plain torch, and compare; rank 0 prints the table.

        Collective. The copies start from the weights and random numbers of now with a new optimizer state, and train
        for `steps` steps with each of `accumulations` micro-batches on `batch`, this rank's: a tuple
        (`engine(*batch)`), a dict (`engine(**batch)`), one argument, or a list of such, taken in turn. The engine
        itself stays as it is. There must be room for the whole model and its optimizer on each rank, and in host memory
        for gradients and weights of all steps of up to four runs. The learning rate stays that of now.

        loss_fn: from (engine, one batch) to the loss, where what the model returns is not it and does not hold it as
        `.loss`, `["loss"]` or `[0]`. offload: also with optimizer state and parameters in host memory, on the stages
        that can. Returns a `Report`, which is true where all is well. Raises ValueError for what cannot be run.
        """
        self._status.check()
        report = in_process.check(self, batch, steps, stages, accumulations, loss_fn, offload)
        if self._sharded.world.writes:
            print(report, flush=True)
        return report

    def describe(self) -> Description:
        """Units and parameters: shapes, dtypes, which rank has which elements, and where; prints as a table."""
        self._status.check_not_destroyed()
        model = self._training.model
        return describe(self._sharded, model.pipelined if isinstance(model, Pipeline) else None)

    def destroy(self) -> None:
        """Take every hook off, give the module whole parameters of its own again, and the rest back; collective.

        The module is a plain one afterwards, also after an exception. A second call does nothing; other methods raise
        RuntimeError then, but for those that only tell what the configuration and the counters say. After an update in
        host memory that failed, and after other ranks were given up, it is no collective: what only other ranks hold
        of resharded parameters is NaN then. A save that runs beside the training loop is waited for; what it failed
        with is raised at the end, when everything is given back.
        """
        if self._status.destroyed:
            return
        saving, sharded, optimizer = self._saving, self._sharded, self.optimizer
        saving.join()
        if steps := self._training.means.apart:
            text = (
                "destroy(): each rank keeps the weights of its replica, %s after a mean; average_replicas() takes one"
            )
            rank_zero(logging.WARNING, text, counted(steps, "step"))
        try:
            if optimizer is not None:
                optimizer.finish()
            self._undo_parts()
            failed = optimizer is not None and optimizer.failure is not None
            alone = failed or sharded.world.watchdog.broken
            sharded.dissolve(alone)
            for form in self._training.forms.divisions:
                form.restore(alone)
            if optimizer is not None:
                self._training.conclude()
            self._recorder.end()
        finally:
            sharded.world.watchdog.close()
            self._accumulation.close()
            retire(self)
            if optimizer is not None:
                optimizer.unbind()  # else a reference to it would keep the state alive
        if (error := saving.error()) is not None:
            raise error

    def __del__(self) -> None:
        """Let go of an engine that was dropped without `destroy()`; may run at any moment, and on any thread.

        So nothing is waited for and no other rank is asked. Parameters that are whole and settled are plain again;
        else, as where they are cut, the next `initialize` of the module takes them back, where all ranks meet.
        """
        if self.__dict__.get("_sharded") is None or sys.is_finalizing():
            return  # destroyed, or never made
        self._let_go()

    def _let_go(self) -> None:
        self._undo_parts()
        self._sharded.leave()
        if self.optimizer is not None:
            self.optimizer.unbind(wait=False)

    def _undo_parts(self) -> None:
        self._saving.signals.close()
        if self._training.profiles is not None:
            self._training.profiles.close()
        self._offload.reload_states()
        self._compiler.undo()
        self._training.recomputing.undo()
        if self._training.forms.sharing is not None:
            self._training.forms.sharing.close()
        if self._training.reality is not None:
            self._training.reality.close()

    @property
    def _config(self) -> Config:
        return self._accumulation.config

    @property
    def _recorder(self) -> StepRecorder:
        return self._training.recorder

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Engine:
        """Let `to`, `cuda`, `float` and the like pass where they would change nothing; raise RuntimeError else."""
        self.module._apply(fn, recurse)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: ranks, files and messages are nobody else's."""
        raise TypeError(
            "an engine cannot be copied or pickled; copy or save engine.module inside zero.GatheredParameters(...), or "
            "call save_checkpoint()"
        )

    def __getattr__(self, name: str) -> Any:
        """Look up what the engine lacks in the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            try:
                return getattr(module, name)
            except AttributeError:
                if hasattr(type(module), name):
                    raise  # of a property that fails, which says itself what is wrong
                who = f"'{type(self).__name__}' object (and its module {type(module).__name__})"
                text = f"{who} has no attribute '{name}'{instead(f'engine.{name}')}"
                raise AttributeError(text, name=name, obj=self) from None
