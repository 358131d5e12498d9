"""One rank's items of an iterable dataset, which every rank reads whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from zero.data.position import Partition


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
        """How many items this rank gets in a whole pass; TypeError if the dataset does not know its length."""
        return len(self.dataset) // (self.size * self.together) * self.size * self.together // self.world_size


class WorkerBatch(NamedTuple):
    """A batch, the worker that read it, and how many items it holds."""

    worker: int
    count: int
    batch: Any


class WorkerCollate:
    """A `collate_fn` that adds the worker's number: after one worker has ended, the others are still read."""

    def __init__(self, collate_fn: Callable[[list], Any]) -> None:
        self._collate = collate_fn

    def __call__(self, items: list) -> WorkerBatch:
        """Make a batch in the worker."""
        return WorkerBatch(_worker(), len(items), self._collate(items))


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id
