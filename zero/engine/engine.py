"""The engine that users hold: a module whose call, backward and step keep ZeRO's promises."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from zero.config import Config
from zero.core.wrap import Sharded
from zero.data import Loader, build_loader
from zero.engine.accumulation import Accumulation, Window
from zero.engine.compiling import Compiling
from zero.engine.offload import Offload, Rest
from zero.engine.progress import Progress
from zero.engine.weights import Weights
from zero.optim.optimizer import ZeroOptimizer
from zero.plan.memory import StateBytes


class Engine(Accumulation, Weights, Offload, Compiling, nn.Module):
    """Wraps a model for training; made by `zero.initialize`.

        loss = engine(batch)
        engine.backward(loss)      # or loss.backward()
        engine.step()              # updates at the accumulation boundary, does nothing before it

    Gradients are the mean over ranks and micro-batches, divided exactly once: the division is one factor of
    the optimizer step, so it holds however the backward was called. Unknown attributes are looked up in the
    wrapped module.
    """

    def __init__(self, sharded: Sharded, optimizer: ZeroOptimizer | None, config: Config, device: torch.device) -> None:
        super().__init__()
        self.module = sharded.module
        self.optimizer = optimizer
        self.lr_scheduler: Any = None
        self.training_dataloader: Loader | None = None
        self.device = device
        self.config = config.raw
        self.global_rank = sharded.mesh.rank
        self.world_size = self.dp_world_size = sharded.mesh.world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self._config = config
        self._sharded = sharded
        self._window = Window()
        self._resting: list[Rest] = []
        self._compiled: dict[nn.Module, Callable[..., Any] | None] = {}
        self._applied = False
        self._progress = Progress(config, self.global_rank, device)
        self._mark_boundary()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped model. An exception leaves the engine usable; gradients of this step are dropped."""
        self._alive()
        self._sharded.recover()
        try:
            with self._progress.phase("forward"):
                return self.module(*inputs, **kwargs)
        except Exception:
            self._sharded.abandon()
            raise

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute and reduce gradients; returns loss / gradient_accumulation_steps for logging, detached.

        `scale_wrt_gas=False` says that the caller has already divided the loss. Raises ValueError for a loss
        that is not a scalar with a graph, RuntimeError without an optimizer.
        """
        self._alive()
        if self.optimizer is None:
            raise RuntimeError("backward() needs an optimizer: give `optimizer` in the JSON or to initialize()")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = (
                f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
                if isinstance(loss, torch.Tensor)
                else type(loss).__name__
            )
            raise ValueError(f"backward() wants the loss, a scalar tensor with a graph; got {what}")
        steps = self.gradient_accumulation_steps()
        reducer = self._sharded.reducer
        rounds = reducer.rounds
        try:
            with self._progress.phase("backward"):
                (loss if scale_wrt_gas else loss * steps).backward(retain_graph=retain_graph)
                if reducer.rounds == rounds:
                    # No parameter of ours was in the graph here; other ranks may have some and wait for us.
                    reducer.flush()
        except Exception:
            self._sharded.abandon()
            raise
        return loss.detach() / steps if scale_wrt_gas else loss.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the accumulation boundary, update the model and step the scheduler."""
        self._alive()
        if self.optimizer is None:
            raise RuntimeError("step() needs an optimizer: give `optimizer` in the JSON or to initialize()")
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and "metrics" not in (lr_kwargs or {}):
            raise ValueError("step(): ReduceLROnPlateau wants step(lr_kwargs={'metrics': ...}) at every boundary")
        self._applied = False
        with self._ending_micro_batch() as boundary:
            if boundary:
                self._update(lr_kwargs or {})

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
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> Loader:
        """A loader that gives each rank its part of `dataset`, in micro-batches."""
        return build_loader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            rank=self.global_rank,
            world_size=self.world_size,
            collate_fn=collate_fn,
            drop_last=self._config.dataloader_drop_last,
            num_workers=num_local_io_workers,
            pin_memory=self.device.type == "cuda",
        )

    def state_nbytes(self) -> StateBytes:
        """Bytes of model state alive on this rank now: parameters, gradients, optimizer (masters included)."""
        held = self._sharded.nbytes()
        return held._replace(optimizer=held.optimizer + (self.optimizer.nbytes() if self.optimizer else 0))

    def destroy(self) -> None:
        """Take every hook off and give the module whole parameters of its own again; collective."""
        if self._sharded is not None:
            self.reload_states()
            self._undo_compile()
            self._sharded.dissolve()
            self._sharded = None

    def __getattr__(self, name: str) -> Any:
        """Look up what the engine lacks in the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def _alive(self) -> None:
        self._need_engine()
        if self.optimizer is not None and self.optimizer.away:
            raise RuntimeError("the engine's states are offloaded; call reload_states() first")

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        self._sharded.recover()
        with self._progress.phase("step"):
            self.optimizer.step()
        self._applied = not self.optimizer.overflow
        self.skipped_steps += self.optimizer.overflow
        self.global_steps += 1
        self.global_samples += self._window.samples
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self._progress.step(self.global_steps, self.skipped_steps, self.get_lr(), self.get_mom(), self.state_nbytes)
