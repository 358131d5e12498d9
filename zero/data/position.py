"""The position of a run in its passes over the data, from which another run continues, also on more or fewer ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from zero.log import counted, rank_zero


class BatchCounts(NamedTuple):
    """One batch of each rank: `given` samples of all ranks together; the first `real` of them are not padding.

    First in the order of the pass, in which ranks take turns by `turn` samples. None if unknown to the loader.
    """

    given: int | None
    real: int | None
    turn: int


@dataclass(frozen=True)
class Position:
    """A place in pass `epoch`.

    start:   samples that were yielded before the current partition began, by worker for an iterable dataset;
    batches: batches that each rank got since then;
    seen:    samples yielded since the beginning of the pass, counted as in `start`.

    Samples are those of all ranks together; with the user's sampler, which is the rank's own, those of one rank.
    """

    epoch: int = 0
    start: tuple[int, ...] = (0,)
    batches: int = 0
    seen: tuple[int, ...] = (0,)

    def after(self, samples: int, worker: int = 0) -> Position:
        """The position one batch further, of this many samples from this worker."""
        seen = tuple(count + samples * (number == worker) for number, count in enumerate(self.seen))
        return replace(self, batches=self.batches + 1, seen=seen)


@dataclass(frozen=True)
class Partition:
    """How a pass is divided among the ranks. Its fields are saved in checkpoints, under "dealing".

    source:   "dealt" (a shuffled order), "tokens" (the same, of which whole steps of a `TokenBatchSampler` are seen),
              "sampler" (the user's), or "stream" (an iterable dataset);
    together: micro-batches of one optimizer step, if ranks take turns by micro-batches, else 0;
    workers:  those that read a stream, at least 1; 1 otherwise;
    samples:  of the dataset, None for a stream; seed: of the shuffle.
    """

    source: str
    batch_size: int
    world_size: int
    together: int
    workers: int
    samples: int | None
    seed: int

    @property
    def turns(self) -> tuple[int, int]:
        """Samples of a turn, and turns of all ranks in a step; sample by sample unless `together` is set."""
        return (self.batch_size, self.together) if self.together else (1, self.world_size)

    def begin(self, epoch: int) -> Position:
        """The beginning of a pass."""
        return Position(epoch, (0,) * self.workers, 0, (0,) * self.workers)

    def save(self, at: Position) -> dict[str, Any]:
        """A position with its partition, as JSON values."""
        place = {"epoch": at.epoch, "start": list(at.start), "batches": at.batches, "seen": list(at.seen)}
        return {**place, "dealing": asdict(self)}

    def load(self, state: Mapping[str, Any]) -> Position:
        """The position from `save`, of any partition; warns if it is not exact. Raises ValueError for anything else."""
        try:
            was = Partition(**state["dealing"])
            at = Position(int(state["epoch"]), tuple(state["start"]), int(state["batches"]), tuple(state["seen"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state of the data loader: got {str(dict(state))[:200]}, wanted what its state_dict() gave: "
                f"{type(error).__name__}: {error}"
            ) from None
        if was == self:
            step = self.batch_size * max(1, self.together)
            handed_out = sum(at.seen) - sum(at.start)
            if self.workers == 1 and (not self.together or handed_out % step == 0):
                return Position(at.epoch, at.seen, 0, at.seen)
            return at  # inside a step, and if workers take turns, the earlier batches decide the next one
        seen = self._seen(at, was)
        return Position(at.epoch, seen, 0, seen)

    def _seen(self, at: Position, was: Partition) -> tuple[int, ...]:
        if was.source != self.source:
            _warn(f"the data came from a {was.source}, now from a {self.source}: pass {at.epoch} starts over")
            return (0,) * self.workers
        if self.source in ("dealt", "tokens") and (was.samples, was.seed) != (self.samples, self.seed):
            _warn(
                f"the dataset had {was.samples} samples and the shuffle seed {was.seed}, now {self.samples} and "
                f"{self.seed}: in pass {at.epoch} samples may come twice, and others not at all"
            )
        if self.source == "sampler" and was.world_size != self.world_size:
            _warn(
                f"each of {was.world_size} ranks had a sampler of its own, now {self.world_size} have: in pass "
                f"{at.epoch} samples may come twice, and others not at all, unless the samplers deal out one order "
                "sample by sample"
            )
            return (at.seen[0] * was.world_size // self.world_size,)
        if was.workers != self.workers:
            _warn(
                f"{counted(was.workers, 'worker')} read the iterable dataset, now {self.workers} do: in pass "
                f"{at.epoch} samples may come twice, and others not at all, unless the dataset deals out its "
                "items to the workers in turn"
            )
            total = sum(at.seen)
            return tuple((total + self.workers - 1 - worker) // self.workers for worker in range(self.workers))
        return at.seen


def _warn(text: str) -> None:
    rank_zero(logging.WARNING, "data: %s", text)
