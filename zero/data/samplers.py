"""Which indices of a shuffled dataset one rank gets, from any place of the order on."""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, Sampler, get_worker_info


class RankSampler(DistributedSampler):
    """torch's `DistributedSampler`, from any place of its shuffled order on: sample by sample, rank by rank.

    It pads at the end of the order with the beginning of it.

    start: samples of the order that were handed out before, to whatever ranks there were.
    """

    start = 0

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)
        order = _shuffled(count, self.seed + self.epoch)
        start, world_size = self.start, self.num_replicas
        for at in range(start + self.rank, start + self.left(start) * world_size, world_size):
            yield order[at % count]

    def left(self, start: int) -> int:
        """How many samples each rank gets from `start` on."""
        return -(-max(0, len(self.dataset) - start) // self.num_replicas)


class MicroBatchSampler(Sampler):
    """The micro-batches of indices of one rank: number k of the shuffled order goes to rank k % world_size.

    `together` of them, a multiple of world_size, are one optimizer step. The order is padded to whole steps with its
    own beginning, or cut to them with `drop_last`. So what a step sees does not depend on the number of ranks, which
    it does where ranks take turns sample by sample. The shuffle is that of torch's `DistributedSampler`.

    start: samples of the order that were handed out before; steps are counted from there.
    """

    start = 0

    def __init__(
        self, samples: int, size: int, together: int, rank: int, world_size: int, drop_last: bool, seed: int
    ) -> None:
        self.samples, self.size, self.together = samples, size, together
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.left(0)

    def left(self, start: int) -> int:
        """How many micro-batches each rank gets from `start` on."""
        rest, whole = max(0, self.samples - start), self.size * self.together
        steps = rest // whole if self.drop_last else -(-rest // whole)
        return steps * self.together // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        order = _shuffled(self.samples, self.seed + self.epoch)
        start = self.start
        for batch in range(self.rank, self.left(start) * self.world_size, self.world_size):
            first = start + batch * self.size
            yield [order[at % self.samples] for at in range(first, first + self.size)]


class SeededIndices(list):
    """Indices of one batch; a worker that reads them draws the random numbers of `seed`."""

    seed = 0


class RankBatchSampler(Sampler):
    """The batches of indices of one rank, in a pass or in what is left of one.

    start: samples of the order (of the rank's own, where the user gave a sampler) that were handed out before;
    skip:  batches after those that are left out, too;
    seed:  that of the shuffle and the number of the pass; each batch has its own, made of these and of its place.
    """

    def __init__(
        self, sampler: Sampler | Iterable[int], size: int, drop_last: bool, rank: int, world_size: int
    ) -> None:
        self.start = self.skip = 0
        self.seed = (0, 0)
        self.sampler = sampler
        self._shared = isinstance(sampler, RankSampler | MicroBatchSampler)
        self._size, self._drop_last = size, drop_last
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return self.left(0)

    def left(self, start: int) -> int:
        """How many batches each rank gets from `start` on; TypeError if the user's sampler does not know."""
        if isinstance(self.sampler, MicroBatchSampler):
            return self.sampler.left(start)
        samples = self.sampler.left(start) if self._shared else max(0, len(self.sampler) - start)
        return samples // self._size if self._drop_last else -(-samples // self._size)

    def __iter__(self) -> Iterator[SeededIndices]:
        start, skip, seed = self.start, self.skip, self.seed
        if self._shared:
            self.sampler.start = start
        indices = self.sampler if self._shared else itertools.islice(iter(self.sampler), start, None)
        batched = isinstance(self.sampler, MicroBatchSampler)
        batches = indices if batched else BatchSampler(indices, self._size, self._drop_last)
        distance = self._size if batched else 1  # of this rank's first sample from that of the next rank
        for number, batch in enumerate(batches):
            if number < skip:
                continue
            seeded = SeededIndices(batch)
            # The place in the order that all ranks share, which no other batch of the pass has.
            before = start if self._shared else start * self._world_size
            seeded.seed = _mixed(*seed, before + number * self._size * self._world_size + self._rank * distance)
            yield seeded


class SeededDataset(Dataset):
    """A dataset whose samples draw, in a worker, the random numbers of their batch's seed.

    A worker's own random numbers would depend on what it has read before, and so on where the pass was resumed.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: SeededIndices) -> list[Any]:
        """The samples of one batch."""
        if get_worker_info() is not None:
            _seed_worker(indices.seed)
        at_once = getattr(self.dataset, "__getitems__", None)
        return at_once(list(indices)) if at_once else [self.dataset[index] for index in indices]


def _shuffled(count: int, seed: int) -> list[int]:
    """The order that torch's `DistributedSampler` makes."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def _mixed(*numbers: int) -> int:
    """A seed of 63 bits in which each of the numbers counts."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _seed_worker(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy.random" in sys.modules:
        # One word more: of the same words it would draw what Python's generator draws.
        sys.modules["numpy.random"].seed([seed & 0xFFFFFFFF, seed >> 32, 1])
