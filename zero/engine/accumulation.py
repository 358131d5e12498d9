"""The micro-batches of one optimizer step, and when their gradients are reduced."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Iterator, Mapping

from zero.config import Config
from zero.core.rounds import Rounds
from zero.core.sharded_module import ShardedModule
from zero.core.weak import while_alive
from zero.engine.status import Status
from zero.log import log_once
from zero.optim.norm import RankReport
from zero.optim.optimizer import ZeroOptimizer

_MANY = 20  # backwards without a step(): more losses than a micro-batch has


class Block(enum.Enum):
    """The block of the training loop that runs. COALESCED: after `coalesce_grad_reduction()`, before its step."""

    NONE = "outside of any block"
    NO_SYNC = "inside no_sync context manager"
    COALESCING = "inside coalesce_grad_reduction()"
    COALESCED = "between a coalesce_grad_reduction() block and its step()"
    STEPPING = "inside step()"


class Running(enum.Enum):
    """The progress of the running micro-batch. TOLD: its boundary was set by hand since its first forward."""

    NEW = "no forward has begun"
    BEGUN = "a forward has begun"
    TOLD = "and the boundary was said since"


class Accumulation:
    """The micro-batches of the running optimizer step, and the batch sizes.

    config: the configuration with the batch sizes of now. boundary: as the user set it, None to count micro-steps from
    `start`. rounds: backward passes that the reducer had seen when the last optimizer step ended. samples: of the
    running step, over all ranks.

    A micro-batch ends with its `step()`. Programs that set the boundary by hand may leave out those that are none, as
    Accelerate does; so there the backward counts its micro-batch, and the forward behind it begins another one if the
    boundary was said since the first forward of this one. `step()` ends what has not ended so.
    """

    def __init__(
        self, config: Config, sharded: ShardedModule, optimizer: ZeroOptimizer | None, status: Status, alike: str | None
    ) -> None:
        self.config = config
        self.boundary: bool | None = None
        self.start = self.rounds = self.samples = 0
        self.more = 1.0
        self._block = Block.NONE
        self._running = Running.NEW
        self._counted = False  # the running micro-batch, by its backward
        self._seen = 0  # backward passes that the reducer had seen at the last `step()`, or exception
        self._sharded: ShardedModule | None = sharded
        self._optimizer = optimizer
        self._status = status
        sharded.reducer.on_flush.append(while_alive(self._backward_ended))  # weak, as we hold the reducer
        self.rounds_of_ranks: Rounds | None = None
        if not config.managed_gradient_accumulation:
            parts = sharded.units, sharded.meshes.same_part, sharded.prefetcher, sharded.reducer
            self.rounds_of_ranks = Rounds(*parts, sharded.sharding.grads, alike)
        self._tell_reducer()

    def is_boundary(self) -> bool:
        """See `Engine.is_gradient_accumulation_boundary`."""
        if self._block in (Block.COALESCING, Block.COALESCED, Block.STEPPING):
            return True
        if not self.config.managed_gradient_accumulation:
            return False
        if self.boundary is not None:
            return self.boundary
        ended = self._status.micro_steps - self._counted - self.start
        return (ended + 1) % self.config.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next steps are boundaries; None goes back to counting, from the last step on.

        A program that calls no `step()` off the boundary says it for each micro-batch, before its forward or backward:
        by that micro-batches are told apart.
        """
        self._need_managed("set_gradient_accumulation_boundary()")
        self.boundary = is_boundary
        if self._running is Running.BEGUN:
            self._running = Running.TOLD
        self._tell_reducer()

    def begin_step(self, micro_batches: int) -> None:
        """Say how many micro-batches this rank runs in the step that begins, perhaps none; collective.

        Ranks may run different numbers with `managed_gradient_accumulation: false` only. Said beforehand, it saves one
        small exchange per micro-batch at stage 3 and where gradients are reduced after each. ValueError for what is no
        count, on all ranks; RuntimeError inside of a step. A micro-batch too many raises, and so does a `step()` that
        comes too early.
        """
        self._status.check()
        if self.rounds_of_ranks is None:
            raise RuntimeError(
                "begin_step() needs managed_gradient_accumulation false in the JSON; it is true, so each step has "
                f"gradient_accumulation_steps={self.config.gradient_accumulation_steps} micro-batches on every rank"
            )
        self.rounds_of_ranks.begin_step(micro_batches)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on their rank whatever the boundary; stages 0 and 1 only.

        They are reduced with those of the next boundary outside: at its backward, or at `step()`. Raises
        RuntimeError where gradients are sharded, inside another block, and from `step()` inside.
        """
        self._status.check()
        if self._sharded.sharding.grads:
            number = self.config.zero_optimization.stage
            why = (
                f"of ZeRO stage {number}"
                if number >= 2
                else "that zero.reduce_every_micro_batch or zero.reduce asks for"
            )
            raise RuntimeError(f"no_sync context manager is incompatible with gradient partitioning logic {why}")
        if self._block is Block.NO_SYNC:
            raise RuntimeError("no_sync context manager reentry is unsupported")
        self._need_no_block("no_sync()")
        self._enter(Block.NO_SYNC)
        try:
            yield
        finally:
            self._enter(Block.NONE)

    @contextlib.contextmanager
    def schedule(self) -> Iterator[None]:
        """As `coalesce_grad_reduction`, with one reduction at every stage: whole gradients stay until the end."""
        with self.coalesce_grad_reduction(), self._sharded.reducer.defer():
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """The backward passes inside are one optimizer step, which the next `step()` takes.

        Where gradients are not sharded (stages 0 and 1) they are reduced once, at the end of the block; elsewhere after
        every backward, because a whole gradient must not stay. The mean is over `gradient_accumulation_steps`
        micro-batches, however many the block has. Raises RuntimeError inside another block, from `step()` inside,
        and with `managed_gradient_accumulation: false`.
        """
        self._status.check()
        self._need_managed("coalesce_grad_reduction()")
        self._need_no_block("coalesce_grad_reduction()")
        self._enter(Block.COALESCING)
        try:
            yield
        except BaseException:
            self._enter(Block.NONE)
            raise
        self._enter(Block.COALESCED)
        self._sharded.reducer.settle()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce now the gradients that are still local; collective, for training loops written by hand.

        `bucket_size` is accepted and changes nothing: units are what is reduced together.
        """
        self._status.check()
        if self._block is not Block.NONE:
            raise RuntimeError(f"allreduce_gradients() {self._block.value}; call it outside")
        self._sharded.recover()
        self._sharded.reducer.settle()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per optimizer step, by changing `gradient_accumulation_steps`; on all ranks alike.

        Raises ValueError for what is no multiple of micro-batch x ranks, RuntimeError in the middle of a window.
        """
        self._status.check()
        per_round = self.config.train_micro_batch_size_per_gpu * self._sharded.meshes.sizes[0]
        if train_batch_size < 1 or train_batch_size % per_round:
            raise ValueError(
                "Train batch size must be divisible by micro-batch data parallelism: "
                f"set_train_batch_size({train_batch_size}) with {per_round} samples per micro-batch over all ranks"
            )
        if self.pending():
            raise RuntimeError(
                f"set_train_batch_size({train_batch_size}) in the middle of an accumulation window (micro-step "
                f"{self._status.micro_steps}); call it between step() at a boundary and the next forward"
            )
        steps = train_batch_size // per_round
        self._configure(train_batch_size=train_batch_size, gradient_accumulation_steps=steps)
        if self._optimizer is not None:
            self._optimizer.bind(self._sharded, self.config.gradient_factor, self.config.counted)
        self._sharded.accumulate_over(steps)
        self.start = self._status.micro_steps
        self._tell_reducer()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward on one rank, and `train_batch_size`; loaders that exist keep theirs."""
        if micro_batch_size < 1:
            raise ValueError(f"set_train_micro_batch_size({micro_batch_size}): wanted at least 1")
        samples = micro_batch_size * self.config.gradient_accumulation_steps * self.config.world_size
        self._configure(train_micro_batch_size_per_gpu=micro_batch_size, train_batch_size=samples)

    def pending(self) -> int:
        """Micro-batches whose gradients wait for the step at the boundary."""
        reducer, steps = self._sharded.reducer, self.config.gradient_accumulation_steps
        counted = (self._status.micro_steps - self.start) % steps if self.boundary is None else 0
        if not counted and not reducer.holds_gradients:
            return 0
        return max(counted, min(reducer.rounds - self.rounds, steps), 1)

    @contextlib.contextmanager
    def ending_micro_batch(self, partial: bool) -> Iterator[bool]:
        """Around a `step()`: gives whether it is at the boundary (or `partial`), and counts the micro-batch."""
        config, reducer = self.config, self._sharded.reducer
        if self._block in (Block.NO_SYNC, Block.COALESCING):
            raise RuntimeError(
                f"It is illegal to call Engine.step() {self._block.value}; leave the block first, as with no_sync"
            )
        alone = self.rounds_of_ranks is None or self._sharded.world.size == 1  # else other ranks may have had one
        if self.idle and alone and not ((self.boundary or partial) and self.pending()):
            raise RuntimeError(
                "step() without a backward since the last step(), so there is no gradient for it: call "
                "engine.backward(loss) before each step(), once per micro-batch (loss.backward() does not count where "
                "it reaches no parameter of this engine). engine.step() and optimizer.step() are the same: call one"
            )
        self.samples, self.more, more = config.train_batch_size, 1.0, not self._counted
        if partial or not config.managed_gradient_accumulation:
            self._block = Block.STEPPING
        if partial and config.managed_gradient_accumulation:
            more = more and not self.idle
            ran = max(1, self._status.micro_steps - self.start + more)
            self.samples = ran * config.train_micro_batch_size_per_gpu * config.world_size
            self.more = 1.0 if config.counted else config.gradient_accumulation_steps / ran
        boundary = self.is_boundary()
        try:
            yield boundary
            self._status.micro_steps += more
            self._end_micro_batch(boundary)
            self._seen = reducer.rounds
            if self._block is Block.COALESCED:
                self._block = Block.NONE
            if boundary:
                self.start, self.rounds = self._status.micro_steps, reducer.rounds
                if self.rounds_of_ranks is not None:
                    self.rounds_of_ranks.reset()
        finally:
            if self._block is Block.STEPPING:
                self._block = Block.NONE
            self._tell_reducer()

    def join(self) -> None:
        """Take part in what other ranks still run of the step; collective."""
        if self.rounds_of_ranks is not None:
            self.rounds_of_ranks.join()

    def count_samples(self, reports: Mapping[int, RankReport]) -> None:
        """Let `samples` be those of a step whose ranks have run as many backwards as they report."""
        if self.rounds_of_ranks is not None:
            ran = sum(int(each.backwards) for each in reports.values()) * self._sharded.meshes.sizes[0] // len(reports)
            self.samples = ran * self.config.train_micro_batch_size_per_gpu

    def pass_ended(self) -> None:
        """A pass over the training data is over, perhaps inside of a step: say so, or drop what there is of that."""
        left, steps = self.pending(), self.config.gradient_accumulation_steps
        if not left or self.boundary is not None or not self.config.managed_gradient_accumulation:
            return
        if self.config.zero.drop_last_window:
            self._sharded.reducer.drop()
            self.restart()
            return
        log_once(
            logging.WARNING,
            f"a pass over the training data ended after {left} of {steps} micro-batches of a step, which begin a step "
            "that the next pass completes. engine.step(partial=True) behind the loop takes a step of them, and "
            '"zero": {"drop_last_window": true} drops them',
        )

    @property
    def idle(self) -> bool:
        """Whether there was no backward since the last `step()`."""
        return self._sharded.reducer.rounds == self._seen

    def begin_forward(self) -> None:
        """A forward that builds a graph begins, perhaps that of another micro-batch."""
        if self._counted and self._running is Running.TOLD:
            self._end_micro_batch(False)
        if self._running is Running.NEW:
            self._running = Running.BEGUN

    def restart(self) -> None:
        """Count the micro-batches of this step from the first again: their gradients are gone, and a mean needs all."""
        self._running, self._counted = Running.NEW, False
        self._status.micro_steps = self.start
        self.rounds = self._seen = self._sharded.reducer.rounds
        if self.rounds_of_ranks is not None:
            self.rounds_of_ranks.reset()
        if self._block is Block.COALESCED:
            self._block = Block.NONE  # what it had reduced is gone, and the block may be repeated
        self._tell_reducer()

    def resume(self) -> None:
        """Begin a step at the counters of now, which come from a checkpoint."""
        self.start, self.samples = self._status.micro_steps, 0
        self.rounds = self._seen = self._sharded.reducer.rounds
        self._running, self._counted = Running.NEW, False
        self._tell_reducer()

    def close(self) -> None:
        """Let go of the parameters: the engine is destroyed. A block that is open may still end."""
        self._sharded = None

    def _backward_ended(self) -> None:
        if self.boundary is False and not self._counted:
            self._counted = True
            self._status.micro_steps += 1
        if self.config.managed_gradient_accumulation and self._sharded.reducer.rounds - self._seen == _MANY:
            self.warn_of_no_step(_MANY)

    def warn_of_no_step(self, least: int = 2) -> None:
        """Warn if so many backwards have waited for their `step()`, and neither a block nor the script has held it."""
        waiting = self._sharded.reducer.rounds - self._seen if self._sharded is not None else 0
        if waiting >= least and self.boundary is not False and self._block is Block.NONE:
            log_once(
                logging.WARNING,
                f"{waiting} backwards since the last engine.step(), without which nothing is trained: call it after "
                "each backward; it counts micro-batches itself, up to gradient_accumulation_steps",
            )

    def _end_micro_batch(self, last: bool) -> None:
        self._running, self._counted = Running.NEW, False
        self._sharded.reducer.end_micro_batch(last)

    def _tell_reducer(self) -> None:
        """Let the backward that comes reduce gradients, or keep them on their rank."""
        if self._sharded is not None:
            local = self._block in (Block.NO_SYNC, Block.COALESCING)
            self._sharded.reducer.boundary = self.is_boundary() and not local

    def _enter(self, block: Block) -> None:
        self._block = block
        self._tell_reducer()

    def _need_no_block(self, what: str) -> None:
        if self._block is not Block.NONE:
            raise RuntimeError(f"{what} {self._block.value}; blocks do not nest (no_sync, coalesce_grad_reduction)")

    def _need_managed(self, what: str) -> None:
        if not self.config.managed_gradient_accumulation:
            raise RuntimeError(
                f"{what} needs managed_gradient_accumulation; it is false in the JSON, so every step() is a boundary"
            )

    def _configure(self, **changes: int) -> None:
        self.config = self.config.model_copy(update=changes)
