"""What one rank gets of the items of an iterable dataset, which every rank reads whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info


class RankShare(IterableDataset):
    """Every `world_size`-th item of an iterable dataset, beginning with item `rank`.

    The last items, if they do not go round, are dropped: a rank with one batch more than the others would
    wait for them for ever. With several workers each one reads the whole dataset, as torch has it, unless the
    dataset itself divides its items by `torch.utils.data.get_worker_info()`.

    start: items of the dataset, by worker, that a resumed pass leaves out before it deals.
    """

    start: Sequence[int] = (0,)

    def __init__(self, dataset: IterableDataset, rank: int, world_size: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        items = _behind(self.dataset, self.start)
        while len(turn := list(itertools.islice(items, self.world_size))) == self.world_size:
            yield turn[self.rank]


class WholeShare(IterableDataset):
    """The micro-batches of an iterable dataset whose turn it is: number k of `size` items goes to rank k % world_size.

    `together` of them, a multiple of world_size, are one optimizer step; items that do not fill one are dropped. So
    what a step sees does not depend on the number of ranks. Holds the items of one step in memory. With several
    workers the order of micro-batches is that of the workers, and depends on the number of ranks after all.

    start: as in `RankShare`.
    """

    start: Sequence[int] = (0,)

    def __init__(self, dataset: IterableDataset, size: int, together: int, rank: int, world_size: int) -> None:
        self.dataset = dataset
        self.size, self.together = size, together
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Any]:
        items, whole = _behind(self.dataset, self.start), self.size * self.together
        while len(step := list(itertools.islice(items, whole))) == whole:
            for index in range(self.rank, self.together, self.world_size):
                yield from step[index * self.size : (index + 1) * self.size]


class Marked(NamedTuple):
    """A batch, the worker that read it, and how many items it holds."""

    worker: int
    count: int
    batch: Any


class Marking:
    """A `collate_fn` that makes `Marked` batches: workers are not read equally far, once one of them has ended."""

    def __init__(self, collate_fn: Callable[[list], Any]) -> None:
        self._collate = collate_fn

    def __call__(self, items: list) -> Marked:
        """Make a batch, where it is read."""
        return Marked(_worker(), len(items), self._collate(items))


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


def _behind(dataset: IterableDataset, start: Sequence[int]) -> Iterator[Any]:
    """The items of a dataset without the first ones, which are read and dropped."""
    items = iter(dataset)
    for _ in itertools.islice(items, start[_worker()]):
        pass
    return items
