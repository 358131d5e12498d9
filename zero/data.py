"""The training data of one rank: torch's DataLoader over its share, with the epochs counted for the user."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler


class RankShare(IterableDataset):
    """Every `world_size`-th item of an iterable dataset, beginning with item `rank`.

    The last items, if they do not go round, are dropped: a rank with one batch more than the others would
    wait for them for ever. With several workers each one reads the whole dataset, as torch has it, unless the
    dataset itself divides its items by `torch.utils.data.get_worker_info()`.
    """

    def __init__(self, dataset: IterableDataset, rank: int, world_size: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.dataset)
        while len(turn := list(itertools.islice(items, self.world_size))) == self.world_size:
            yield turn[self.rank]


class WholeShare(IterableDataset):
    """The micro-batches of an iterable dataset whose turn it is: number k of `size` items goes to rank k % world_size.

    `together` of them, a multiple of world_size, are one optimizer step; items that do not fill one are dropped. So
    what a step sees does not depend on the number of ranks. Holds the items of one step in memory. With several
    workers the order of micro-batches is that of the workers, and depends on the number of ranks after all.
    """

    def __init__(self, dataset: IterableDataset, size: int, together: int, rank: int, world_size: int) -> None:
        self.dataset = dataset
        self.size, self.together = size, together
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Any]:
        items, whole = iter(self.dataset), self.size * self.together
        while len(step := list(itertools.islice(items, whole))) == whole:
            for index in range(self.rank, self.together, self.world_size):
                yield from step[index * self.size : (index + 1) * self.size]


class MicroBatches(Sampler):
    """The micro-batches of indices of one rank: number k of the shuffled order goes to rank k % world_size.

    `together` of them, a multiple of world_size, are one optimizer step. The order is padded to whole steps with its
    own beginning, or cut to them with `drop_last`. So what a step sees does not depend on the number of ranks, which
    it does where samples are dealt out one by one. The shuffle is that of torch's `DistributedSampler`.
    """

    def __init__(
        self, samples: int, size: int, together: int, rank: int, world_size: int, drop_last: bool, seed: int
    ) -> None:
        self.samples, self.size = samples, size
        self.rank, self.world_size, self.seed = rank, world_size, seed
        steps = samples // (size * together) if drop_last else -(-samples // (size * together))
        self.batches = steps * together  # of all ranks
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator).tolist()
        for batch in range(self.rank, self.batches, self.world_size):
            yield [order[at % self.samples] for at in range(batch * self.size, (batch + 1) * self.size)]


class _Remaining(Sampler):
    """The batches of indices of a pass, without the first `skip`, which a resumed run has seen already."""

    def __init__(self, batches: BatchSampler | MicroBatches) -> None:
        self.batches = batches
        self.skip = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batches), self.skip, None)


class Loader:
    """Batches of this rank, one pass per `iter()`. Build it with `build_loader`.

    Each pass shuffles anew: it sets the epoch of the sampler (and of the dataset, if that has `set_epoch`) by
    itself, 0, 1, ... `state_dict()` says where the data are; after `load_state_dict()` the next pass goes on
    there, without reading the samples before, unless the dataset is iterable and has to be read from its
    beginning.

    Attributes:
        dataset: as given.
        batch_size: samples per batch on this rank.
        sampler: what gives this rank its indices; None for an IterableDataset.
        epoch: the pass that is running or, between two passes, the next one.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        collate_fn: Callable[[list], Any] | None = None,
        drop_last: bool = False,
        sampler: Sampler | Iterable[int] | None = None,
        seed: int = 0,
        pin_memory: bool = False,
        num_workers: int = 0,
        together: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.epoch = 0
        self.sampler = sampler
        self._rank, self._world_size, self._seed, self._drop_last = rank, world_size, seed, drop_last
        self._together = together
        if together is not None and (together < 1 or together % world_size):
            raise ValueError(f"together: got {together}; wanted a multiple of the world size {world_size}")
        self._delivered = 0  # batches of that pass
        self._next_epoch = 0
        self._next_skip = 0  # batches that the next pass leaves out, because a resumed run has seen them
        # Its own generator: a pass must not draw from torch's global one, on which dropout and the like
        # depend.
        self._generator = torch.Generator()
        common: dict[str, Any] = {
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "num_workers": num_workers,
            "generator": self._generator,
        }
        if isinstance(dataset, IterableDataset):
            if sampler is not None:
                raise ValueError("sampler: an IterableDataset gives its own order, there is none to choose")
            share = RankShare(dataset, rank, world_size)
            if together is not None:
                share = WholeShare(dataset, batch_size, together, rank, world_size)
            self._loader = DataLoader(share, batch_size=batch_size, drop_last=drop_last, **common)
            return
        if sampler is None:
            if len(dataset) == 0:
                raise ValueError("dataset: wanted at least one sample, got an empty one")
            self.sampler = self._own_sampler(len(dataset))
        dealt = isinstance(self.sampler, MicroBatches)
        self._remaining = _Remaining(self.sampler if dealt else BatchSampler(self.sampler, batch_size, drop_last))
        self._loader = DataLoader(dataset, batch_sampler=self._remaining, **common)

    def _own_sampler(self, samples: int) -> Sampler:
        rank, world_size, seed = self._rank, self._world_size, self._seed
        if self._together is None:
            return DistributedSampler(self.dataset, world_size, rank, shuffle=True, seed=seed)
        return MicroBatches(samples, self.batch_size, self._together, rank, world_size, self._drop_last, seed)

    def __len__(self) -> int:
        """Return the number of batches in a whole pass; TypeError if the dataset does not know its length."""
        if self.sampler is not None:
            return len(self._remaining)
        if self._together is not None:
            return len(self.dataset) // (self.batch_size * self._together) * self._together // self._world_size
        samples = len(self.dataset) // self._world_size
        return samples // self.batch_size if self._drop_last else -(-samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass, or what is left of the one that was resumed."""
        epoch, skip = self._next_epoch, self._next_skip
        self.epoch, self._delivered = epoch, skip
        self._next_epoch, self._next_skip = epoch + 1, 0
        return self._pass(epoch, skip)

    def _pass(self, epoch: int, skip: int) -> Iterator[Any]:
        # Everything that this pass shares with others is set here, at its first batch, and not in `__iter__`:
        # torch's samplers shuffle when the first index is asked for, and by then another pass may have been
        # begun.
        for owner in (self.sampler, self.dataset):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        # Workers are seeded from this: otherwise on each rank and in each pass, the same again when resumed.
        self._generator.manual_seed(self._seed + epoch * self._world_size + self._rank)
        if self.sampler is None:
            batches = itertools.islice(self._loader, skip, None)
        else:
            self._remaining.skip = skip
            batches = iter(self._loader)
        for count, batch in enumerate(batches, start=skip + 1):
            self.epoch, self._delivered = epoch, count
            yield batch
        self.epoch, self._delivered = epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one of this number; the same number gives the same order in every run."""
        if epoch != self._next_epoch:
            self._next_epoch, self._next_skip = epoch, 0
            self.epoch, self._delivered = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the pass, and how many samples of it all ranks together have been handed."""
        samples = self._delivered * self.batch_size * self._world_size
        return {"epoch": self.epoch, "samples": samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next pass go on behind a saved position, also one of another world size or batch size.

        If the samples seen are no multiple of the global batch of now, the rest of them comes again.
        """
        epoch, skip = state["epoch"], state["samples"] // (self.batch_size * self._world_size)
        # The last batch may have been handed out before the loop asked for one more and so ended the pass.
        if self.sampler is not None and skip >= len(self):
            epoch, skip = epoch + 1, 0
        self.epoch, self._delivered = epoch, skip
        self._next_epoch, self._next_skip = epoch, skip


def build_loader(
    dataset: Dataset,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list], Any] | None = None,
    drop_last: bool = False,
    sampler: Sampler | Iterable[int] | None = None,
    seed: int = 0,
    pin_memory: bool = False,
    num_workers: int = 0,
    together: int | None = None,
) -> Loader:
    """Return the batches of one rank out of a dataset that all ranks share.

    A dataset with indices is shuffled and dealt out by torch's `DistributedSampler`. **It pads:** if the
    samples do not go round, the first ones of the shuffled order come twice, so that all ranks have as many
    (777 samples on 2 ranks are 389 each, 778 together). That is right for training and wrong for a
    measurement, whose mean is then over 778; a measurement divides the indices itself and weighs by the true
    counts. An `IterableDataset` is dealt out item by item, and what does not go round is dropped
    (`RankShare`).

    Args:
        dataset: map-style, or an IterableDataset that yields the same items on every rank.
        batch_size: samples per batch on this rank.
        rank, world_size: which share, of how many.
        collate_fn: list of samples to batch; None is torch's default.
        drop_last: leave out the last batch of a pass if it is not full.
        sampler: indices of *this rank*, instead of the DistributedSampler: what it yields is taken as it is.
        seed: of the shuffle and of the workers.
        pin_memory, num_workers: as in torch's DataLoader.
        together: deal out whole batches in turn instead of samples (`MicroBatches`, `WholeShare`): this many of all
            ranks, a multiple of world_size, are one optimizer step, and a pass has whole steps only.
    """
    return Loader(
        dataset,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        collate_fn=collate_fn,
        drop_last=drop_last,
        sampler=sampler,
        seed=seed,
        pin_memory=pin_memory,
        num_workers=num_workers,
        together=together,
    )


class RepeatingLoader:
    """Batches without end: when the loader is through, its next pass begins. `len()` is that of one pass."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        # Begun at the first batch only, so that a position loaded before it counts.
        self._batches: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        # The third try is for a pass that was resumed at its very end and has nothing left.
        for _ in range(3):
            for batch in self._batches:
                return batch
            self._batches = iter(self.loader)
        raise RuntimeError("the loader has no batch: its dataset is empty, or drop_last left nothing")
