"""One rank's share of a dataset: indices of a shuffled order, from any place on, or items of what all ranks read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, Sampler, get_worker_info

from zero.data.position import Partition
from zero.data.seeds import mixed, seed_generators


class RankSampler(DistributedSampler):
    """One rank's samples, from any place in the shuffled order of torch's `DistributedSampler` on.

    Ranks take turns by `size` samples: turn number k goes to rank k % world_size. `together` turns, a multiple of
    world_size, make a step. The order is padded to whole steps from its beginning, or cut to them with `drop_last`.
    As in `DistributedSampler`, the ranks take turns sample by sample and the end is padded, unless `partition` counts
    the micro-batches of an optimizer step: then a step's samples do not depend on the number of ranks.

    start: samples of the order that were yielded before, on any number of ranks; steps are counted from there.
    """

    start = 0

    def __init__(self, dataset: Dataset, partition: Partition, rank: int, drop_last: bool) -> None:
        super().__init__(dataset, partition.world_size, rank, shuffle=True, seed=partition.seed)
        self.size, self.together = partition.turns
        self.drop_last = drop_last and partition.together > 0

    def __len__(self) -> int:
        return self.left(0)

    def left(self, start: int) -> int:
        """The number of samples that each rank gets from `start` on."""
        return self._steps(start) * self.size * self.together // self.num_replicas

    def _steps(self, start: int) -> int:
        left, step = max(0, len(self.dataset) - start), self.size * self.together
        return left // step if self.drop_last else -(-left // step)

    def __iter__(self) -> Iterator[int]:
        count, start = len(self.dataset), self.start
        order = shuffled(count, self.seed + self.epoch)
        for turn in range(self.rank, self._steps(start) * self.together, self.num_replicas):
            first = start + turn * self.size
            for at in range(first, first + self.size):
                yield order[at % count]


class SeededIndices(list):
    """Indices of one batch; a worker that reads them draws the random numbers of `seed`."""

    def __init__(self, indices: Iterable[int] = (), seed: int = 0) -> None:
        super().__init__(indices)
        self.seed = seed


class RankBatchSampler(Sampler):
    """One rank's batches of indices, in a pass or the rest of one.

    start: samples of the order (of the rank's own, with the user's sampler) that were yielded before;
    skip:  batches after those, skipped as well;
    seed:  that of the shuffle and the number of the pass; each batch has its own seed, from these and its place.
    """

    def __init__(self, sampler: Sampler | Iterable[int], partition: Partition, rank: int, drop_last: bool) -> None:
        self.start = self.skip = 0
        self.seed = (0, 0)
        self.sampler = sampler
        self._shared = isinstance(sampler, RankSampler)
        self._size, self._drop_last = partition.batch_size, drop_last
        self._rank, self._world_size = rank, partition.world_size

    def __len__(self) -> int:
        return self.left(0)

    def left(self, start: int) -> int:
        """The number of batches that each rank gets from `start` on; TypeError if the user's sampler does not know."""
        samples = self.sampler.left(start) if self._shared else max(0, len(self.sampler) - start)
        return samples // self._size if self._drop_last else -(-samples // self._size)

    def __iter__(self) -> Iterator[SeededIndices]:
        start, skip, seed = self.start, self.skip, self.seed
        if self._shared:
            self.sampler.start = start
        indices = self.sampler if self._shared else itertools.islice(iter(self.sampler), start, None)
        distance = self.sampler.size if self._shared else 1  # from this rank's first sample to that of the next rank
        for number, batch in enumerate(BatchSampler(indices, self._size, self._drop_last)):
            if number < skip:
                continue
            # The place in the order that all ranks share, unique to this batch in the pass.
            before = start if self._shared else start * self._world_size
            place = before + number * self._size * self._world_size + self._rank * distance
            yield SeededIndices(batch, mixed(*seed, place))


class SeededDataset(Dataset):
    """A dataset whose samples draw, in a worker, the random numbers of their batch's seed, wherever a pass resumed."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: SeededIndices) -> list[Any]:
        """The samples of one batch."""
        if get_worker_info() is not None:
            seed_generators(indices.seed)
        at_once = getattr(self.dataset, "__getitems__", None)
        return at_once(list(indices)) if at_once else [self.dataset[index] for index in indices]


class RankIterable(IterableDataset):
    """One rank's micro-batches of an iterable dataset: number k of `size` items goes to rank k % world_size.

    `together` micro-batches, a multiple of world_size, are one optimizer step. An incomplete last step is
    dropped: a rank with one more batch than the others would wait for them for ever. Holds the items of one step in
    memory. So a step's samples do not depend on the number of ranks; with several workers, whose order is that of
    the micro-batches, they do. As in torch, each worker reads the whole dataset, unless the dataset itself divides
    its items by `torch.utils.data.get_worker_info()`.

    start: items of the dataset, by worker, that a resumed pass skips.
    """

    start: Sequence[int] = (0,)

    def __init__(self, dataset: IterableDataset, partition: Partition, rank: int) -> None:
        self.dataset = dataset
        self.size, self.together = partition.turns
        self.rank, self.world_size = rank, partition.world_size

    def __iter__(self) -> Iterator[Any]:
        items, whole = iter(self.dataset), self.size * self.together
        for _ in itertools.islice(items, self.start[_worker()]):
            pass  # read and dropped
        while len(step := list(itertools.islice(items, whole))) == whole:
            for index in range(self.rank, self.together, self.world_size):
                yield from step[index * self.size : (index + 1) * self.size]

    def count(self) -> int:
        """The number of items of this rank in a whole pass; TypeError if the dataset does not know its length."""
        return len(self.dataset) // (self.size * self.together) * self.size * self.together // self.world_size


class WorkerBatch(NamedTuple):
    """A batch, the worker that read it, and how many items it holds."""

    worker: int
    count: int
    batch: Any


def collate_in_worker(collate_fn: Callable[[list], Any], items: list) -> WorkerBatch:
    """A batch with the number of the worker that makes it: after one worker has ended, the others are still read."""
    return WorkerBatch(_worker(), len(items), collate_fn(items))


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


def shuffled(count: int, seed: int) -> list[int]:
    """The order of torch's `DistributedSampler`."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
