"""Counters of an engine, and whether it may go on: it may be half updated, half loaded, offloaded or destroyed."""

from __future__ import annotations

from zero.optim.optimizer import ZeroOptimizer


class Status:
    """Shared by the parts of an engine. Counters are those of the run, over all ranks alike.

    step_applied: whether the last step changed parameters. not_finite: steps of this engine with a loss of inf or NaN.
    half_updated: why the weights are those of no step; only `destroy()` is left then.
    half_loaded: the same after a load that was broken off; another load repairs it.
    follows: it has no parameters any more, and only runs the forward of the engine that has.
    generating: inside `gathered_for_generation`. streams: loops over weights that go out, which have not ended.
    """

    def __init__(self, optimizer: ZeroOptimizer | None) -> None:
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self.step_applied = False
        self.not_finite = 0
        self.half_updated: str | None = None
        self.half_loaded: str | None = None
        self.destroyed = self.generating = self.follows = False
        self.streams = 0
        self._optimizer = optimizer

    def check(self, loading: bool = False) -> None:
        """Raise RuntimeError, with what to do, where the engine cannot go on; `loading` may follow a broken load."""
        self.check_not_destroyed()
        optimizer = self._optimizer
        if self.half_updated is None and optimizer is not None and optimizer.failure is not None:
            self.set_half_updated(f"{optimizer.failure}, after step {self.global_steps}")
        if self.half_updated is not None:
            raise RuntimeError(self.half_updated)
        if self.half_loaded is not None and not loading:
            raise RuntimeError(self.half_loaded)
        if optimizer is not None and optimizer.away:
            raise RuntimeError("the engine's states are offloaded; call reload_states() first")

    def check_outside(self, caller: str) -> None:
        """Raise RuntimeError where `caller` would change weights that are being read."""
        if self.generating:
            raise RuntimeError(
                f"{caller} inside engine.gathered_for_generation(), which holds all parameters whole; call it after "
                "the block has ended"
            )
        if self.streams:
            raise RuntimeError(
                f"{caller} inside a loop over engine.stream_weights() or engine.weight_updates(), whose weights would "
                "be of two steps; call it after the loop has ended"
            )

    def check_not_destroyed(self) -> None:
        """Raise RuntimeError after `destroy()`."""
        if self.follows:
            raise RuntimeError("this engine only runs forward; another one has its model by now: call that one")
        if self.destroyed:
            raise RuntimeError("this engine was destroyed; make a new one with zero.initialize")

    def set_half_updated(self, why: str) -> None:
        """From now on `check` raises with `why`."""
        self.half_updated = (
            f"the weights are half updated: {why}. Call destroy(), and go on from a checkpoint with a new engine"
        )
