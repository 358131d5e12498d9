"""The engine of a model in stages: what DeepSpeed's answers beside `train_batch` and `eval_batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch

from zero.compat.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from zero.engine.engine import Engine


class _Said(int):
    """True or false, also where it is called: DeepSpeed's programs do both."""

    def __call__(self) -> bool:
        return bool(self)


class PipelineEngine(Engine):
    """An engine that `initialize` makes where the model is divided, or computes its loss by a function."""

    is_first_stage = property(lambda self: _Said(self._pipelining("is_first_stage").is_first), doc="Of this rank.")
    is_last_stage = property(lambda self: _Said(self._pipelining("is_last_stage").is_last), doc="Of this rank.")
    micro_batches = property(lambda self: self._pipelining("micro_batches").micro_batches, doc="Those of a schedule.")
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
        self._pipelining("set_dataloader").feed.repeat(loader)

    def set_dataiterator(self, iterator: Iterable[Any]) -> None:
        """Take batches from it where `train_batch` and `eval_batch` bring none."""
        self._pipelining("set_dataiterator").feed.iterator = iter(iterator)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Have each batch of an iterator go through a function before it is used."""
        self._pipelining("set_batch_fn").feed.batch_fn = fn

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
        if self._config.grid.size("pp") > 1 and not self._pipelining(method).stepping:
            raise RuntimeError(
                f"engine.{method}() of a model whose stages lie on several ranks; engine.train_batch(data_iter) runs "
                "forward, backward and step of all of them"
            )
