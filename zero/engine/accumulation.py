"""Which micro-batches make up one optimizer step, and when their gradients travel."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zero.config import Config
from zero.core.sharded_module import ShardedModule
from zero.engine.queries import Queries


class Place(enum.Enum):
    """Where the loop is. COALESCED: behind a block of `coalesce_grad_reduction`, before its step."""

    OPEN = "outside of any block"
    NO_SYNC = "inside no_sync context manager"
    COALESCING = "inside coalesce_grad_reduction()"
    COALESCED = "between a coalesce_grad_reduction() block and its step()"
    STEPPING = "inside step()"


@dataclass
class Window:
    """The accumulation window: `boundary` as the user set it, None to count micro-steps from its `start`."""

    boundary: bool | None = None
    start: int = 0
    place: Place = Place.OPEN
    rounds: int = 0  # backward passes that the reducer had seen when the last step ended
    samples: int = 0  # of the step that runs, over all ranks


class Accumulation(Queries):
    """The boundary and what moves it; mixed into the engine."""

    _config: Config
    _sharded: ShardedModule
    _window: Window
    optimizer: Any
    micro_steps: int

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch that runs is the last of its optimizer step.

        With `managed_gradient_accumulation: false` every `step()` is, so it is true only while one runs.
        """
        window = self._window
        if window.place in (Place.COALESCING, Place.COALESCED, Place.STEPPING):
            return True
        if not self._config.managed_gradient_accumulation:
            return False
        if window.boundary is not None:
            return window.boundary
        return (self.micro_steps - window.start + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide the boundary yourself, until told otherwise; None goes back to counting, from the last step on."""
        self._need_managed("set_gradient_accumulation_boundary()")
        self._window.boundary = is_boundary
        self._mark_boundary()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on their rank whatever the boundary; stages 0 and 1 only.

        They are reduced with those of the next boundary outside: at its backward, or at `step()`. Raises
        RuntimeError where gradients are cut, inside another block, and from `step()` inside.
        """
        self._alive()
        if self._sharded.sharding.grads:
            number = self.zero_optimization_stage()
            why = (
                f"of ZeRO stage {number}"
                if number >= 2
                else "that zero.reduce_every_micro_batch or zero.reduce asks for"
            )
            raise RuntimeError(f"no_sync context manager is incompatible with gradient partitioning logic {why}")
        if self._window.place is Place.NO_SYNC:
            raise RuntimeError("no_sync context manager reentry is unsupported")
        self._need_open("no_sync()")
        self._enter(Place.NO_SYNC)
        try:
            yield
        finally:
            self._enter(Place.OPEN)

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """The backward passes inside are one optimizer step, which the next `step()` takes.

        Where gradients are not cut (stages 0 and 1) they are reduced once, at the end of the block; elsewhere after
        every backward, because a whole gradient must not stay. The mean is over `gradient_accumulation_steps`
        micro-batches, however many the block has. Raises RuntimeError inside another block, from `step()` inside,
        and with `managed_gradient_accumulation: false`.
        """
        self._alive()
        self._need_managed("coalesce_grad_reduction()")
        self._need_open("coalesce_grad_reduction()")
        self._enter(Place.COALESCING)
        try:
            yield
        except BaseException:
            self._enter(Place.OPEN)
            raise
        self._enter(Place.COALESCED)
        self._sharded.reducer.settle()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce now what is still on its rank; collective, does nothing where nothing is. For hand-made loops.

        `bucket_size` is accepted and changes nothing: units are what is reduced together.
        """
        self._alive()
        if self._window.place is not Place.OPEN:
            raise RuntimeError(f"allreduce_gradients() {self._window.place.value}; call it outside")
        self._sharded.recover()
        self._sharded.reducer.settle()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per optimizer step, by changing `gradient_accumulation_steps`; on all ranks alike.

        Raises ValueError for what is no multiple of micro-batch x ranks, RuntimeError in the middle of a window.
        """
        self._alive()
        per_round = self.train_micro_batch_size_per_gpu() * self._sharded.mesh.data.size
        if train_batch_size < 1 or train_batch_size % per_round:
            raise ValueError(
                "Train batch size must be divisible by micro-batch data parallelism: "
                f"set_train_batch_size({train_batch_size}) with {per_round} samples per micro-batch over all ranks"
            )
        counted = (self.micro_steps - self._window.start) % self.gradient_accumulation_steps()
        if self._sharded.reducer.holds_gradients or (self._window.boundary is None and counted):
            raise RuntimeError(
                f"set_train_batch_size({train_batch_size}) in the middle of an accumulation window "
                f"(micro-step {self.micro_steps}); call it between step() at a boundary and the next forward"
            )
        steps = train_batch_size // per_round
        self._configure(train_batch_size=train_batch_size, gradient_accumulation_steps=steps)
        if self.optimizer is not None:
            self.optimizer.bind(self._sharded, self._config.gradient_factor)
        self._sharded.accumulate_over(steps)
        self._window.start = self.micro_steps
        self._mark_boundary()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward on one rank, and `train_batch_size`; loaders that exist keep theirs."""
        if micro_batch_size < 1:
            raise ValueError(f"set_train_micro_batch_size({micro_batch_size}): wanted at least 1")
        whole = micro_batch_size * self.gradient_accumulation_steps() * self._config.world_size
        self._configure(train_micro_batch_size_per_gpu=micro_batch_size, train_batch_size=whole)

    @contextlib.contextmanager
    def _ending_micro_batch(self) -> Iterator[bool]:
        """Around a `step()`: gives whether it is at the boundary, and moves the window on if it succeeds."""
        window, reducer = self._window, self._sharded.reducer
        if window.place in (Place.NO_SYNC, Place.COALESCING):
            raise RuntimeError(
                f"It is illegal to call Engine.step() {window.place.value}; leave the block first, as with no_sync"
            )
        window.samples = self.train_batch_size()
        if not self._config.managed_gradient_accumulation:
            window.place = Place.STEPPING
            rounds = reducer.rounds - window.rounds
            window.samples = rounds * self.train_micro_batch_size_per_gpu() * self._config.world_size
        boundary = self.is_gradient_accumulation_boundary()
        try:
            yield boundary
            self.micro_steps += 1
            if window.place is Place.COALESCED:
                window.place = Place.OPEN
            if boundary:
                window.start, window.rounds = self.micro_steps, reducer.rounds
        finally:
            if window.place is Place.STEPPING:
                window.place = Place.OPEN
            self._mark_boundary()

    def _begin_window(self) -> None:
        """Count micro-batches from the first again: the gradients of those before are gone, and a mean needs all."""
        window = self._window
        self.micro_steps, window.rounds = window.start, self._sharded.reducer.rounds
        if window.place is Place.COALESCED:
            window.place = Place.OPEN  # what it had reduced is gone, and the block may be repeated
        self._mark_boundary()

    def _mark_boundary(self) -> None:
        local = self._window.place in (Place.NO_SYNC, Place.COALESCING)
        self._sharded.reducer.boundary = self.is_gradient_accumulation_boundary() and not local

    def _enter(self, place: Place) -> None:
        self._window.place = place
        if self._sharded is not None:  # the engine may have been destroyed inside the block
            self._mark_boundary()

    def _need_open(self, what: str) -> None:
        if self._window.place is not Place.OPEN:
            raise RuntimeError(
                f"{what} {self._window.place.value}; blocks do not nest (no_sync, coalesce_grad_reduction)"
            )

    def _need_managed(self, what: str) -> None:
        if not self._config.managed_gradient_accumulation:
            raise RuntimeError(
                f"{what} needs managed_gradient_accumulation; it is false in the JSON, so every step() is a boundary"
            )

    def _configure(self, **changes: int) -> None:
        self._config = self._config.model_copy(update=changes)
