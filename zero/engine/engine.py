"""The engine that users hold: a module whose call, backward and step keep ZeRO's promises."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from zero.checkpoint.retention import Retention
from zero.checkpoint.saver import Saver
from zero.checkpoint.store_barrier import StoreBarrier
from zero.config import Config
from zero.core.hooks import as_forward
from zero.core.sharded_module import ShardedModule
from zero.data import Loader
from zero.engine.accumulation import Accumulation, Window
from zero.engine.checkpoint.load import LoadCheckpoint
from zero.engine.checkpoint.save import SaveCheckpoint
from zero.engine.compiling import Compiling
from zero.engine.destroyed import destroyed_class
from zero.engine.feeding import make_loader
from zero.engine.offload import Offload, Rest
from zero.engine.precision import Precision, check_loss, scaled
from zero.engine.progress import Progress
from zero.engine.randomness import Randomness
from zero.engine.replicas import Replicas
from zero.engine.weights import Weights
from zero.log import logger
from zero.optim.optimizer import HeldOpen, ZeroOptimizer
from zero.plan.host import HostBytes
from zero.plan.memory import StateBytes
from zero.recompute.modules import Recomputing
from zero.watchdog.hang_report import Phase

if TYPE_CHECKING:
    from zero.engine.check.compare import Report


class Engine(Accumulation, Weights, SaveCheckpoint, LoadCheckpoint, Offload, Compiling, nn.Module):
    """Wraps a model for training; made by `zero.initialize`.

        loss = engine(batch)
        engine.backward(loss)      # or loss.backward()
        engine.step()              # updates at the accumulation boundary, does nothing before it

    Gradients are the mean over ranks and micro-batches, divided exactly once: the division is one factor of
    the optimizer step, so it holds however the backward was called. Unknown attributes are looked up in the
    wrapped module.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        optimizer: ZeroOptimizer | None,
        config: Config,
        device: torch.device,
        recomputing: Recomputing,
    ) -> None:
        super().__init__()
        self.module = sharded.module
        self.optimizer = optimizer
        self.lr_scheduler: Any = None
        self.training_dataloader: Loader | None = None
        self.device = device
        self.config = config.raw
        self.global_rank = sharded.mesh.global_rank
        self.world_size = self.dp_world_size = sharded.mesh.data.size
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self._config = config
        self._sharded = sharded
        self._watchdog = sharded.mesh.watchdog
        self._recomputing = recomputing
        sharded.reducer.on_flush(recomputing.backward_ended)
        self._window = Window()
        saving, data = config.zero.checkpoint, sharded.mesh.data
        self._saver = Saver(
            StoreBarrier(data.rank, data.size, data.watchdog.prefix, config.zero.timeout),
            Retention(saving.keep, saving.keep_optimizer),
            saving.asynchronous,
            device.type == "cuda",
        )
        self._resting: list[Rest] = []
        self._compiled: dict[nn.Module, Callable[..., Any] | None] = {}
        self._initialize: Any = None  # what made this engine; check() makes others with it
        self._torn: str | None = None  # why the weights are not those of any step
        self._half_loaded: str | None = None  # the same, where another checkpoint repairs it
        self._applied = False
        self._progress = Progress(config, self.global_rank, device)
        self._precision = Precision(config, device)
        self._randomness = Randomness(sharded.mesh, device) if sharded.numerics.tree else None
        every = config.zero.check_replicas
        self._replicas = Replicas(sharded, optimizer, every) if every and optimizer is not None else None
        self._mark_boundary()
        self._self = id(self)  # a copy of us must not let go of what is not its own

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped model.

        An exception, Ctrl-C among them, leaves the engine usable: the gradients of this step are dropped, and its
        micro-batches are counted from the first again. So it is in `backward`.
        """
        return self._run(self.module, inputs, kwargs)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module's `generate` as its forward: what it reads by itself is gathered, and released at its end.

        Where parameters are cut, all ranks must call it, and Hugging Face's own is told `synced_gpus=True`, unless the
        caller says otherwise: a rank whose text ends early goes on until all have ended, and none waits for another.
        Raises AttributeError where the module has none.
        """
        self._alive()
        method = getattr(self.module, "generate", None)
        if method is None:
            raise AttributeError(f"the module of this engine, a {type(self.module).__name__}, has no method 'generate'")
        several = self.world_size > 1 and self._sharded.sharding.params
        if several and _knows_synced_gpus(self.module, method):
            kwargs.setdefault("synced_gpus", True)
        return self._run(functools.partial(as_forward, self.module, method), inputs, kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute and reduce gradients; returns loss / gradient_accumulation_steps for logging, detached.

        `scale_wrt_gas=False` says that the caller has already divided the loss. Raises ValueError for a loss
        that is not a scalar with a graph, RuntimeError without an optimizer.
        """
        self._alive()
        if self.optimizer is None:
            raise RuntimeError("backward() needs an optimizer: give `optimizer` in the JSON or to initialize()")
        check_loss("backward()", loss)
        steps = self.gradient_accumulation_steps()
        reducer = self._sharded.reducer
        rounds = reducer.rounds
        try:
            with self._watchdog.call(Phase.BACKWARD), self._progress.phase("backward"):
                scaled(loss, 1 if scale_wrt_gas else steps, reducer).backward(retain_graph=retain_graph)
                if reducer.rounds == rounds:
                    # No parameter of ours was in the graph here; other ranks may have some and wait for us.
                    reducer.flush()
        except BaseException:
            self._abandon()
            raise
        return loss.detach() / steps if scale_wrt_gas else loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for `engine.scale(loss).backward()`; outside fp16 the loss itself.

        Raises ValueError for a loss that is not a scalar with a graph.
        """
        self._alive()
        check_loss("scale()", loss)
        return scaled(loss, 1, self._sharded.reducer)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the accumulation boundary, update the model and step the scheduler.

        After an exception that came before the first weight was changed the engine is as after one in `backward`.
        After a later one the weights are half updated, and all that the engine still does is `destroy()`. Inside
        `GatheredParameters` of parameters that are cut it raises on all ranks, and may be called again outside.
        """
        self._alive()
        self._sharded.check_parameters()
        if self.optimizer is None:
            raise RuntimeError("step() needs an optimizer: give `optimizer` in the JSON or to initialize()")
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and "metrics" not in (lr_kwargs or {}):
            raise ValueError("step(): ReduceLROnPlateau wants step(lr_kwargs={'metrics': ...}) at every boundary")
        self._applied = False
        with self._ending_micro_batch() as boundary:
            if boundary:
                self._update(lr_kwargs or {})
            self._sharded.reducer.end_micro_batch(boundary)
        if boundary:
            self._look_at_save()

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed parameters."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the last step's averaged gradient before clipping; None before the first step."""
        return self.optimizer.grad_norm if self.optimizer else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those of earlier micro-batches. Not needed in a training loop."""
        self._sharded.drop_gradients()
        for param in self.module.parameters():
            param.grad = None

    def deepspeed_io(
        self,
        dataset: Dataset,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Iterable[int] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Loader:
        """A loader that gives each rank its part of `dataset`, in micro-batches.

        route: "train" shuffles; "eval" and "predict" deal the samples out in their order, padded so that all ranks
        have as many. data_sampler: this rank's indices instead, taken as they are. pin_memory counts on a GPU only;
        num_local_io_workers: None reads in this process.
        """
        return make_loader(
            self._config,
            self.device,
            dataset,
            batch_size,
            route,
            pin_memory,
            data_sampler,
            collate_fn,
            num_local_io_workers,
        )

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
        self._alive()
        from zero.engine.check import here

        report = here.check(self, self._initialize, batch, steps, stages, accumulations, loss_fn, offload)
        if self.global_rank == 0:
            print(report, flush=True)
        return report

    def state_nbytes(self) -> StateBytes:
        """Bytes of model state alive on this rank's device now: parameters, gradients, optimizer (masters included)."""
        held = self._sharded.nbytes()
        return held._replace(optimizer=held.optimizer + (self.optimizer.nbytes() if self.optimizer else 0))

    def host_nbytes(self) -> HostBytes | None:
        """Bytes of model state of this rank off the device, in host memory and in files; None without offload."""
        return self._sharded.offload.host if self._sharded.offload is not None else None

    def destroy(self) -> None:
        """Take every hook off, give the module whole parameters of its own again, and the rest back; collective.

        The module is a plain one afterwards, also after an exception. A second call does nothing; other methods raise
        RuntimeError then, but for those that only tell what the configuration and the counters say. After an update in
        host memory that failed, and after other ranks were given up, it is no collective: what only other ranks hold
        of a parameter that is cut is NaN then. A save that runs beside the training loop is waited for; what it failed
        with is raised at the end, when everything is given back.
        """
        if self._sharded is not None:
            self._saver.join()
            try:
                if self.optimizer is not None:
                    self.optimizer.finish()
                self.reload_states()
                self._undo_compile()
                self._recomputing.undo()
                failed = self.optimizer is not None and self.optimizer.failure is not None
                self._sharded.dissolve(failed or self._watchdog.broken)
            finally:
                self._watchdog.close()
                self._sharded = None
                self.__class__ = destroyed_class(type(self))
                if self.optimizer is not None:
                    self.optimizer.unbind()  # whoever still holds it must not keep the state alive
            if (error := self._saver.error()) is not None:
                raise error

    def __del__(self) -> None:
        """Let go of an engine that was dropped without `destroy()`; may run at any moment, and on any thread.

        So nothing is waited for and no other rank is asked. Parameters that are whole and settled are plain again;
        else, as where they are cut, the next `initialize` of the module takes them back, where all ranks meet.
        """
        held = self.__dict__
        if held.get("_sharded") is None or held.get("_self") != id(self) or sys.is_finalizing():
            return  # destroyed, never made, or a copy of one
        self.reload_states()
        self._undo_compile()
        self._recomputing.undo()
        self._sharded.leave()
        self._sharded = None
        if self.optimizer is not None:
            self.optimizer.unbind(wait=False)

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
                raise AttributeError(f"{who} has no attribute '{name}'", name=name, obj=self) from None

    def _alive(self) -> None:
        if self._torn is None and self.optimizer is not None and self.optimizer.failure is not None:
            self._tear(f"{self.optimizer.failure}, after step {self.global_steps}")
        if self._torn is not None or self._half_loaded is not None:
            raise RuntimeError(self._torn or self._half_loaded)
        if self.optimizer is not None and self.optimizer.away:
            raise RuntimeError("the engine's states are offloaded; call reload_states() first")

    def _run(self, call: Callable[..., Any], inputs: Any, kwargs: Any) -> Any:
        self._alive()
        if self._sharded.recover():
            self._begin_window()
        try:
            watched, timed = self._watchdog.call(Phase.FORWARD), self._progress.phase("forward")
            with watched, timed, self._precision.forward(), self._seeded(), self._recomputing.scope():
                inputs, kwargs = self._precision.cast((inputs, kwargs))
                return call(*inputs, **kwargs)
        except BaseException as error:
            self._abandon()
            if (why := self._precision.mixed(error, self.module)) is not None:
                raise RuntimeError(why) from error
            raise

    def _abandon(self) -> None:
        """Drop the gradients of this step after an exception, which must not be hidden by another."""
        try:
            self._sharded.abandon()
        except RuntimeError as error:
            if str(error) != self._watchdog.status.verdict:  # else it is the exception on its way
                logger.warning("after an exception the engine could not be made usable: %s", error)
        self._begin_window()

    def _step_failed(self, error: BaseException) -> None:
        if not self.optimizer.updating:
            self._abandon()
            return
        how = f"{type(error).__name__}: {error}" if self.optimizer.failure is None else str(self.optimizer.failure)
        self._tear(f"step {self.global_steps + 1} ended on rank {self.global_rank} with {how}")

    def _tear(self, why: str) -> None:
        self._torn = (
            f"the weights are half updated: {why}. Call destroy(), and go on from a checkpoint with a new engine"
        )

    def _seeded(self) -> contextlib.AbstractContextManager[None]:
        if self._randomness is None or not self.module.training:
            return contextlib.nullcontext()
        return self._randomness.forward(self.global_steps, self._sharded.reducer.leaf.micro_batch)

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        self._sharded.recover()
        try:
            with self._watchdog.call(Phase.STEP), self._progress.phase("step"):
                if self._replicas is not None:
                    self._replicas.before_step(self.global_steps + 1)
                self.optimizer.step()
                self._recomputing.after_step(self._sharded.mesh.data)
        except HeldOpen:
            raise  # the gradients are there for the step outside of the block
        except BaseException as error:
            self._step_failed(error)
            raise
        self._applied = not self.optimizer.overflow
        self.skipped_steps += self.optimizer.overflow
        self.global_steps += 1
        self.global_samples += self._window.samples
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self._progress.waited(self.optimizer.waited())
        self._progress.step(
            self.global_steps, self.skipped_steps, self.get_lr(), self.get_mom(), self.state_nbytes, self.host_nbytes()
        )


def _knows_synced_gpus(module: nn.Module, generate: Callable[..., Any]) -> bool:
    """Whether a module's `generate`, or that of a part which it hands its keywords to, takes `synced_gpus`."""
    known = inspect.signature(generate).parameters
    if "synced_gpus" in known or all(value.kind is not value.VAR_KEYWORD for value in known.values()):
        return "synced_gpus" in known
    below = (getattr(each, "generate", None) for each in module.modules() if each is not module)
    return any("synced_gpus" in inspect.signature(found).parameters for found in below if callable(found))
