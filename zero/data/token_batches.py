"""Batches within a budget of tokens, dealt to the ranks by cost."""

from __future__ import annotations

import itertools
import logging
import operator
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal, NoReturn

import torch.distributed as dist
from torch.utils.data import Sampler

from zero import log
from zero.data.position import Partition, Position
from zero.data.samplers import SeededIndices, shuffled
from zero.data.seeds import mixed
from zero.plan.balance import best_fit, karmarkar_karp

Batches = list[list[int]]  # of one rank in one step, each the indices of its samples


class TokenBatchSampler(Sampler[list[int]]):
    """This rank's batches of at most `max_tokens` tokens, for torch's DataLoader (`batch_sampler=`) and `deepspeed_io`.

    All ranks make one plan from the same arguments, without a message: the shuffled order is cut into optimizer steps,
    and each step dealt to ranks so that they have about equal costs (Karmarkar-Karp). A batch has the sum of its
    lengths, as packed by `zero.pack`; padded it would have more. No sample comes twice in a pass.

    Each pass has its own shuffle; passes count from 0, or from `set_epoch`. After `load_state_dict` the next one is the
    rest of the saved one, from a whole step on, also for another number of ranks.

    Args:
        lengths: tokens of each sample of the dataset, by its index.
        max_tokens: of a batch, and so of a sample.
        balance: "tokens", a sample of L tokens costs L; "flops", a L + b L^2 with (a, b) of `cost`. For transformers of
            width h that is (6 * h, 1): 24 h^2 L for the products of a block, and 4 h L^2 for its attention.
        seed: of the shuffle.
        drop_last: leave out the last step of a pass if more samples would fit into it. Else its batches are smaller.
        accumulation: batches per rank in an optimizer step; the more there are, the closer are the costs.
        equal: the same number of batches on each rank. The last samples of a pass, less than one for each batch of a
            step, may be left out then; the log says it once. Else ranks have `accumulation` batches on average, and one
            with long sequences has fewer: take `steps()`.
        rank, world_size: of the data-parallel ranks; by default those of torch.distributed or of the launcher.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        max_tokens: int,
        balance: Literal["tokens", "flops"] = "tokens",
        seed: int = 0,
        drop_last: bool = False,
        *,
        cost: tuple[float, float] | None = None,
        accumulation: int = 1,
        equal: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if balance not in ("tokens", "flops") or (balance == "flops") != (cost is not None):
            raise ValueError(
                f'balance: got {balance!r} with cost={cost}, wanted "tokens" without a cost, or "flops" with '
                "cost=(a, b), for transformers (6 * hidden_size, 1)"
            )
        for name, number in (("max_tokens", max_tokens), ("accumulation", accumulation)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}: got {number!r}, wanted an integer of at least 1")
        self.rank, self.world_size = _rank_of(rank, world_size)
        self.lengths, self.max_tokens = _checked(lengths, max_tokens), max_tokens
        self.seed, self.drop_last, self.equal = seed, drop_last, equal
        self._cost, self.accumulation = cost or (1, 0), accumulation
        self._most = self.world_size * accumulation  # batches of a step
        if equal and len(self.lengths) < self._most:
            raise ValueError(
                f"lengths: got {log.counted(len(self.lengths), 'sample')} for accumulation={accumulation} on "
                f"{log.counted(self.world_size, 'rank')}; wanted one for each batch, or equal=False"
            )
        self.partition = Partition("tokens", 1, self.world_size, 0, 1, len(self.lengths), seed)
        self._reset(self.partition.begin(0))
        self._length = -1, 0  # an epoch, and its batches on this rank
        self._said = False

    @property
    def epoch(self) -> int:
        """The number of the next pass."""
        return self.next_pass.epoch

    @property
    def batch_size(self) -> NoReturn:
        """Batches differ. Accelerate and Lightning ask for it before they deal batches to ranks, which is refused."""
        if self.world_size == 1:
            raise AttributeError("a TokenBatchSampler has no batch_size")
        raise RuntimeError(
            f"batches of a TokenBatchSampler are those of rank {self.rank} of {self.world_size}: dealt to the ranks "
            "once more, most would be lost; no accelerator.prepare for its loader, and Lightning's Trainer with "
            "use_distributed_sampler=False"
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass; the same number gives the same batches in every run."""
        if epoch != self.epoch:
            self._reset(self.partition.begin(epoch))

    def __len__(self) -> int:
        """This rank's batches in the next pass as a whole, which is planned for that (a million samples: 20 s)."""
        if self._length[0] != self.epoch:
            self._length = self.epoch, sum(len(ranks[self.rank]) for _, ranks in self.plan(self.epoch))
        return self._length[1]

    def __iter__(self) -> Iterator[list[int]]:
        """Begin the next pass with its first batch."""
        skipped = self.next_pass.batches
        for number, batch in enumerate(itertools.chain.from_iterable(self._begin()), 1):
            if number > skipped:
                self._drawn = number
                yield batch

    def steps(self) -> Iterator[Batches]:
        """This rank's batches of each optimizer step of the next pass; with `equal=False` there may be none in one."""
        for batches in self._begin():
            self._drawn += len(batches)
            yield batches

    def plan(self, epoch: int, place: int = 0) -> Iterator[tuple[int, list[Batches]]]:
        """Each step from a place in the shuffled order on: the place where it ends, and the batches by rank."""
        count = len(self.lengths)
        order = shuffled(count, self.seed + epoch)
        if self.drop_last:
            order += order  # to see whether the last step would go on
        tokens = list(itertools.accumulate((self.lengths[sample] for sample in order), initial=0))
        while place < count:
            left = len(order) - place
            if self.equal and left < self._most:
                return
            most = bisect_right(tokens, tokens[place] + self._most * self.max_tokens) - 1 - place
            over = 2.0
            while over > 1:  # one sample for each batch always fits
                if self.equal and 0 < left - most < self._most <= left - self._most:
                    most = left - self._most  # so that what is left makes a step
                samples = order[place : place + most]
                ranks, over = self._dealt(samples)
                # Not much less at once: a step that is smaller than it had to be stays so.
                most = max(self._most, min(most - 1, int(most / min(over, 1.05))))
            place += len(samples)
            if place > count:
                return
            yield place, ranks

    def _dealt(self, samples: Sequence[int]) -> tuple[list[Batches], float]:
        """Batches by rank, and how many times as many tokens, or batches, as a step has room for."""
        parts = self._divided(samples, self.world_size)
        if not self.equal:
            ranks = [
                [[part[at] for at in batch] for batch in best_fit([self.lengths[at] for at in part], self.max_tokens)]
                for part in parts
            ]
            return ranks, sum(map(len, ranks)) / self._most
        for part in parts:  # one long sequence may cost as much as all that another rank has
            while len(part) < self.accumulation:
                donor = max(parts, key=len)
                part.append(donor.pop(donor.index(min(donor, key=self.lengths.__getitem__))))
        ranks = [self._divided(part, self.accumulation) for part in parts]
        return ranks, max(sum(self.lengths[at] for at in batch) for mine in ranks for batch in mine) / self.max_tokens

    def _divided(self, samples: Sequence[int], parts: int) -> list[list[int]]:
        (linear, square), lengths = self._cost, [self.lengths[sample] for sample in samples]
        costs = [linear * length + square * length**2 for length in lengths]
        return [[samples[at] for at in part] for part in karmarkar_karp(costs, parts)]

    def _begin(self) -> Iterator[Batches]:
        """This rank's batches in each step of the next pass."""
        at = self.next_pass
        self._reset(at)
        self.next_pass = self.partition.begin(at.epoch + 1)
        place, ends, seed = at.start[0], self._ends, (self.seed, at.epoch)
        for end, ranks in self.plan(at.epoch, place):
            place, mine = end, ranks[self.rank]
            ends.append(((ends[-1][0] if ends else 0) + len(mine), place))
            yield [SeededIndices(batch, mixed(*seed, batch[0])) for batch in mine]
        if place < len(self.lengths) and not (self.drop_last or self._said):
            self._said = True
            left = log.counted(len(self.lengths) - place, "sample")
            log.rank_zero(logging.WARNING, "data: the last %s of a pass are left out: too few to deal equally", left)

    def _reset(self, at: Position) -> None:
        self.next_pass = self._begun = at
        self._drawn = at.batches  # this rank's batches since the running pass began
        self._ends: list[tuple[int, int]] = []  # of each step of it, those batches and the place in the order

    def whole_steps(self, at: Position) -> Position:
        """A position that has batches since the pass began, as one of whole steps."""
        known = self._ends if (at.epoch, at.start) == (self._begun.epoch, self._begun.start) else []
        ended = bisect_right(known, at.batches, key=operator.itemgetter(0))
        place = (known[ended - 1][1] if ended else at.start[0],)
        return Position(at.epoch, place, 0, place)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position in the data: the pass, and how many samples of all ranks its whole steps have had.

        batches: that the running pass has given to the loop on this rank. A DataLoader with workers asks for more of
        them ahead, so it must be said; torchdata's StatefulDataLoader saves the right one by itself.
        """
        given = self._drawn if batches is None else batches
        return self.partition.save(self.whole_steps(replace(self._begun, batches=given)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass continue after a saved position; ValueError for other values."""
        at = self.partition.load(state)
        self._reset(self.partition.begin(at.epoch + 1) if self.is_over(at) else at)

    def is_over(self, at: Position) -> bool:
        """Whether no step is left after a place inside a pass."""
        return at.start[0] > 0 and next(self.plan(at.epoch, at.start[0]), None) is None

    def partition_of(self, dataset: Any, rank: int, world_size: int) -> Partition:
        """The partition of passes; ValueError unless the lengths are of this dataset, and the batches of this rank."""
        if (self.rank, self.world_size) != (rank, world_size):
            raise ValueError(
                f"TokenBatchSampler: got rank {self.rank} of {self.world_size}, and a loader of rank {rank} of "
                f"{world_size}; wanted rank={rank}, world_size={world_size}"
            )
        if hasattr(dataset, "__len__") and len(dataset) != len(self.lengths):
            raise ValueError(f"TokenBatchSampler: got {len(self.lengths)} lengths for {len(dataset)} samples")
        return self.partition


def _rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    joined = dist.is_available() and dist.is_initialized()
    if rank is None:
        rank = dist.get_rank() if joined else log.rank()
    if world_size is None:
        world_size = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: got {rank} of world_size={world_size}, wanted one of 0 to {world_size - 1}")
    return rank, world_size


def _checked(lengths: Any, max_tokens: int) -> list[int]:
    """The lengths as Python's integers."""
    found = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    if not found:
        raise ValueError("lengths: wanted at least one sample, got none")
    for index, length in enumerate(found):
        if not isinstance(length, Integral) or not 1 <= length <= max_tokens:
            raise ValueError(f"lengths[{index}]: got {length!r}, wanted an integer of 1 to max_tokens={max_tokens}")
    return [int(length) for length in found]
