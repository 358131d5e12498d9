"""The engine of a model in stages: what DeepSpeed's answers beside `train_batch` and `eval_batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Literal

import torch

from zero.data.loader import RepeatingLoader
from zero.engine.engine import Engine
from zero.engine.pipeline import Pipeline
from zero.parallel.pipeline.topology import PipelineParallelGrid, PipeModelDataParallelTopology


class _CallableBool(int):
    """True or false, also where it is called: DeepSpeed's programs do both."""

    def __call__(self) -> bool:
        return bool(self)


class PipelineEngine(Engine):
    """An engine that `initialize` makes where the model is divided, or computes its loss by a function."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One optimizer step: all its micro-batches forward and backward in a schedule, then `step()`; collective.

        data_iter: gives batches (inputs, targets), or dicts of what the model is called with; the same on all ranks
        whose stages are of one replica. None: those of `training_data`, over and over, or of `set_dataiterator`.
        Returns the loss, fp32 [], on all ranks: the mean over micro-batches and data-parallel ranks. Raises
        RuntimeError, on all ranks, where an iterator ends too early or gives ranks of a replica different batches.
        """
        return self._pipeline.train_batch(self.step, data_iter)

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: Literal["avg"] | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """As many micro-batches as a schedule of a step has, or `num_micro_batches`, forward in eval mode; collective.

        Returns the mean loss on all ranks, without `bcast_loss` on those of the last stage; of a model that computes
        none, and where `initialize` was given no `loss_fn`, the mean output. `reduce_output="avg"`: over data-parallel
        ranks, too. return_logits: a pair of it and, on ranks of the last stage, the outputs in order.
        """
        how = return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
        return self._pipeline.eval_batch(data_iter, *how)

    @property
    def _pipeline(self) -> Pipeline:
        self._status.check_not_destroyed()
        pipeline = self._training.model
        if pipeline.feed.iterator is None and self.training_dataloader is not None:
            pipeline.feed.iterator = RepeatingLoader(self.training_dataloader)
        return pipeline

    is_first_stage = property(lambda self: _CallableBool(self._pipeline.is_first), doc="Of this rank.")
    is_last_stage = property(lambda self: _CallableBool(self._pipeline.is_last), doc="Of this rank.")
    micro_batches = property(lambda self: self._pipeline.micro_batches, doc="Those of a schedule.")
    num_stages = property(lambda self: len(self._pipeline.pipelined.places), doc="Those of all ranks.")
    stage_id = property(lambda self: self._pipeline.pipelined.here[0], doc="The first one of this rank.")

    @cached_property
    def grid(self) -> PipelineParallelGrid:
        """The ranks along its axes."""
        sizes = self._config.grid
        return PipelineParallelGrid(
            PipeModelDataParallelTopology(sizes.size("pp"), sizes.size("tp"), self.dp_world_size)
        )

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take batches from it, over and over, where `train_batch` and `eval_batch` bring none."""
        self._pipeline.feed.iterator = RepeatingLoader(loader)

    def set_dataiterator(self, iterator: Iterable[Any]) -> None:
        """Take batches from it where `train_batch` and `eval_batch` bring none."""
        self._pipeline.feed.iterator = iter(iterator)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Have each batch of an iterator go through a function before it is used."""
        self._pipeline.feed.batch_fn = fn

    def get_additional_losses(self) -> dict[str, Any] | None:
        """What `get_additional_losses` of the module says on this rank; None where it has no such method."""
        return getattr(self.module, "get_additional_losses", lambda: None)()

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: whatever a stage returns is passed on, masks included."""

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes of activations may change from one micro-batch to the next."""

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `Engine.backward`; RuntimeError where stages lie on several ranks."""
        self._by_hand("backward")
        return super().backward(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """See `Engine.step`; RuntimeError where stages lie on several ranks, outside of `train_batch`."""
        self._by_hand("step")
        super().step(*args, **kwargs)

    def _by_hand(self, method: str) -> None:
        if self._config.grid.size("pp") > 1 and not self._pipeline.stepping:
            raise RuntimeError(
                f"engine.{method}() of a model whose stages lie on several ranks; engine.train_batch(data_iter) runs "
                "forward, backward and step of all of them"
            )
