"""The loader of one rank, and a loader that repeats another without end."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, default_collate

from zero.config import Config
from zero.data.position import BatchCounts, Partition, Position
from zero.data.samplers import (
    RankBatchSampler,
    RankIterable,
    RankSampler,
    SeededDataset,
    WorkerBatch,
    collate_in_worker,
)
from zero.data.token_batches import TokenBatchSampler

ROUTES = ("train", "eval", "predict")  # DeepSpeed's words for what a loader is used for; only "train" shuffles
_END = object()


class Loader:
    """One rank's batches of a dataset that all ranks share, one pass per `iter()`.

    A dataset with indices is shuffled and divided as by torch's `DistributedSampler`. **It pads:** if the samples do
    not divide evenly, the first ones of the shuffled order come twice, so that all ranks get equally many (777 samples
    on 2 ranks are 389 each, 778 together). That is right for training and wrong for a measurement, whose mean is then
    over 778; `engine.gather_for_metrics` drops the padding. Ranks take turns at the items of an `IterableDataset`, and
    an incomplete last turn is dropped (`RankIterable`).

    Each pass has its own shuffle: it sets the epoch of the sampler (and of the dataset, if that has `set_epoch`)
    to 0, 1, ... A loop's own `sampler.set_epoch(n)` is `set_epoch(n)`, unless n is the number of the last pass.
    `state_dict()` has the position in the data. After `load_state_dict()` the next pass is the rest of the saved one:
    unseen samples in their order, also for another number of ranks or in batches of another size. Seen samples are not
    read again, unless the dataset is iterable and must be read from its beginning.

    Args:
        dataset: map-style, or an IterableDataset that yields the same items on every rank.
        batch_size: samples per batch on this rank.
        rank, world_size: this rank's number, and the number of ranks.
        collate_fn: list of samples to batch; None is torch's default.
        drop_last: leave out the last batch of a pass if it is not full.
        sampler: indices of *this rank*, used unchanged instead of the DistributedSampler's; or a `TokenBatchSampler`,
            whose batches have their own sizes.
        seed: of the shuffle and of the workers.
        pin_memory, num_workers: as in torch's DataLoader.
        together: ranks take turns by whole batches instead of samples (`RankSampler`): this many batches of all
            ranks, a multiple of world_size, are one optimizer step, and a pass has whole steps only.

    Attributes:
        dataset, batch_size: as given.
        sampler: the source of this rank's indices; None for an IterableDataset.
        on_batch: called with each batch before it is yielded, unless None.
        on_end: called when a pass has ended, unless None.
    """

    def __init__(
        self,
        dataset: Dataset | Sequence[Any],
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
        _check(dataset, batch_size, collate_fn, sampled=sampler is not None)
        self.dataset = dataset
        self.batch_size = batch_size
        self.sampler = sampler
        self._rank, self._drop_last = rank, drop_last
        if together is not None and (together < 1 or together % world_size):
            raise ValueError(f"together: got {together}; wanted a multiple of the world size {world_size}")
        # A separate generator: a pass must not draw from torch's global one, on which dropout and the like depend.
        self._generator = torch.Generator()
        common: dict[str, Any] = {
            "pin_memory": pin_memory,
            "num_workers": num_workers,
            "generator": self._generator,
        }
        stream = isinstance(dataset, IterableDataset)
        if stream and sampler is not None:
            raise ValueError("sampler: an IterableDataset gives its own order, there is none to choose")
        self._partition = Partition(
            source="stream" if stream else "dealt" if sampler is None else "sampler",
            batch_size=batch_size,
            world_size=world_size,
            together=together or 0,
            workers=max(1, num_workers) if stream else 1,
            samples=None if stream or sampler is not None else len(dataset),
            seed=seed,
        )
        if stream:
            items = RankIterable(dataset, self._partition, rank)
            collate = functools.partial(collate_in_worker, collate_fn or default_collate)
            self._source: RankBatchSampler | TokenBatchSampler | RankIterable = items
            self._loader = DataLoader(items, batch_size, collate_fn=collate, drop_last=drop_last, **common)
        else:
            if sampler is None:
                self.sampler = RankSampler(dataset, self._partition, rank, drop_last)
            if isinstance(sampler, TokenBatchSampler):
                self._source, self._partition = sampler, sampler.partition_of(dataset, rank, world_size)
            else:
                self._source = RankBatchSampler(self.sampler, self._partition, rank, drop_last)
            seeded = SeededDataset(dataset) if num_workers else dataset
            self._loader = DataLoader(seeded, batch_sampler=self._source, collate_fn=collate_fn, **common)
        self._here = self._next = self._partition.begin(0)
        self.on_batch: Callable[[BatchCounts], None] | None = None
        self.on_end: Callable[[], object] | None = None
        self._sampler_epoch = getattr(self.sampler, "epoch", None)  # another one there was set by the loop
        self._loads = 0  # positions loaded so far; a pass begun before the last load ends

    @property
    def epoch(self) -> int:
        """The current pass or, between two passes, the next one."""
        return self._here.epoch

    def __len__(self) -> int:
        """Return the number of batches in a whole pass; TypeError if the dataset does not know its length."""
        if not isinstance(self._source, RankIterable):
            return len(self._source)
        samples = self._source.count()
        return samples // self.batch_size if self._drop_last else -(-samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass, or the rest of a resumed one."""
        return self._pass(self._turn(), self._loads)

    def _turn(self) -> Position:
        """Make the next pass the current one; returns where it begins."""
        self._follow_sampler()
        self._here, self._next = self._next, self._partition.begin(self._next.epoch + 1)
        return self._here

    def _follow_sampler(self) -> None:
        """Let the next pass have the number that the loop has set in the sampler, if any."""
        if (epoch := getattr(self.sampler, "epoch", None)) != self._sampler_epoch:
            self.set_epoch(epoch)

    def _pass(self, at: Position, loads: int) -> Iterator[Any]:
        batches: Iterator[Any] | None = None
        if self._loads != loads:  # a position was loaded before the first batch, so there is no pass to end
            at, loads = self._turn(), self._loads
        while self._loads == loads:
            # Begun with its first batch, not in `__iter__`: a pass sets state that all passes share.
            batches = self._begin(at) if batches is None else batches
            batch = next(batches, _END)
            if batch is _END:
                self._here = self._partition.begin(at.epoch + 1)
                if self.on_end is not None:
                    self.on_end()
                return
            if self.on_batch is not None:
                self.on_batch(self._counts(at))
            if isinstance(batch, WorkerBatch):
                at = at.after(batch.count * self._partition.world_size, batch.worker)
                batch = batch.batch
            else:
                at = at.after(self._per_batch)
            self._here = at
            yield batch

    @property
    def _per_batch(self) -> int:
        """The number of samples that a full batch of indices adds to `Position.seen`."""
        return self.batch_size * (1 if self._partition.source == "sampler" else self._partition.world_size)

    def _counts(self, at: Position) -> BatchCounts:
        """The batch after a position."""
        turn, ranks = self._partition.turns[0], self._partition.world_size
        if not isinstance(self.sampler, DistributedSampler) or self.sampler.num_replicas != ranks:
            return BatchCounts(None, None, turn)
        if isinstance(self.sampler, RankSampler):
            seen, end = at.seen[0], at.start[0] + self.sampler.left(at.start[0]) * ranks
        else:
            seen, end = at.seen[0] * ranks, self.sampler.total_size
        given = min(self.batch_size * ranks, end - seen)
        return BatchCounts(given, min(given, max(0, len(self.sampler.dataset) - seen)), turn)

    def _begin(self, at: Position) -> Iterator[Any]:
        """The batches after a position. torch's samplers shuffle when the first index is asked for."""
        partition = self._partition
        for owner in (self.sampler, self.dataset):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(at.epoch)
        self._sampler_epoch = getattr(self.sampler, "epoch", None)
        # Workers are seeded from this: different for each rank and pass, and the same again after a resume.
        self._generator.manual_seed(partition.seed + at.epoch * partition.world_size + self._rank)
        if isinstance(self._source, RankBatchSampler):
            self._source.start, self._source.skip = at.start[0], at.batches
            self._source.seed = (partition.seed, at.epoch)
            return iter(self._loader)
        if isinstance(self._source, TokenBatchSampler):
            self._source.next_pass = at
            self._sampler_epoch = at.epoch + 1  # it goes on to that with the first batch
            return iter(self._loader)
        self._source.start = at.start
        return itertools.islice(iter(self._loader), at.batches, None)

    def skip(self, batches: int) -> Iterator[Any]:
        """Begin the next pass after its first `batches`, which only an iterable dataset has to read."""
        if self._partition.source == "stream":
            return itertools.islice(self, batches, None)
        self._follow_sampler()
        at = self._next
        seen = at.seen[0] + batches * self._per_batch
        self._next = replace(at, batches=at.batches + batches, seen=(seen,))
        return iter(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass; the same number gives the same order in every run."""
        self._sampler_epoch = getattr(self.sampler, "epoch", None)
        if epoch != self._next.epoch:
            self._here = self._next = self._partition.begin(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, the same on all ranks, as a small dictionary of JSON values."""
        tokens = isinstance(self._source, TokenBatchSampler)
        return self._partition.save(self._source.whole_steps(self._here) if tokens else self._here)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass continue after a saved position, also one of another world size or batch size.

        A running pass ends; one that has not yielded its first batch begins there. A warning says what cannot be exact:
        the user's samplers at another world size, another number of workers for an iterable dataset, another dataset.
        Raises ValueError for other values.
        """
        at = self._partition.load(state)
        if isinstance(self._source, TokenBatchSampler) and self._source.is_over(at):
            at = self._partition.begin(at.epoch + 1)
        # The last batch may have been yielded before the loop asked for one more and so ended the pass.
        if isinstance(self._source, RankBatchSampler) and at.seen[0]:
            with contextlib.suppress(TypeError):  # of a sampler that does not know its length
                at = at if self._source.left(at.start[0]) > at.batches else self._partition.begin(at.epoch + 1)
        self._here = self._next = at
        self._sampler_epoch = getattr(self.sampler, "epoch", None)
        self._loads += 1


def _check(dataset: Any, batch_size: Any, collate_fn: Any, sampled: bool) -> None:
    """Raise ValueError for arguments that would fail only at the first batch, when training has begun."""
    if isinstance(dataset, DataLoader | Loader):
        raise ValueError(
            f"dataset: got a {type(dataset).__name__}; wanted the dataset itself (its .dataset), of which each rank "
            "gets its part"
        )
    stream = isinstance(dataset, IterableDataset)
    if not stream and not (hasattr(dataset, "__getitem__") and (sampled or hasattr(dataset, "__len__"))):
        raise ValueError(
            f"dataset: got a {type(dataset).__name__}; wanted one with __len__ and __getitem__, or a "
            "torch.utils.data.IterableDataset"
        )
    if not stream and not sampled and not len(dataset):
        raise ValueError("dataset: wanted at least one sample, got an empty one")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size!r}, wanted an integer of at least 1")
    if collate_fn is not None and not callable(collate_fn):
        raise ValueError(f"collate_fn: got a {type(collate_fn).__name__}, wanted a function of a list of samples")


class RepeatingLoader:
    """Batches without end: after each pass of the loader the next one begins. `len()` is that of one pass."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        # Begun only at the first batch, so that a position loaded before it counts.
        self._batches: Iterator[Any] = iter(())

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state; AttributeError if it has none."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next batch be the one after a saved position; AttributeError if the loader cannot."""
        self.loader.load_state_dict(state)
        self._batches = iter(())

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        # The third try is for a pass that was resumed at its very end.
        for _ in range(3):
            for batch in self._batches:
                return batch
            self._batches = iter(self.loader)
        raise RuntimeError("the loader has no batch: its dataset is empty, or drop_last left nothing")


def skip_first_batches(loader: Iterable[Any], count: int) -> Iterator[Any]:
    """The rest of a loader's next pass, without its first `count` batches; later passes are whole.

    A loader of the engine and torch's DataLoader do not read those, unless the dataset is iterable; others, subclasses
    among them, read and drop them. After a checkpoint the engine's loaders continue by themselves if their `state_dict`
    is saved with it. Raises ValueError for a negative count.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"skip_first_batches(count=...): got {count!r}, wanted an integer of at least 0")
    if isinstance(loader, Loader):
        return loader.skip(count)
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return itertools.islice(loader, count, None)
    of_batches = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "persistent_workers")
    same = {name: getattr(loader, name) for name in inspect.signature(DataLoader).parameters if name not in of_batches}
    return iter(DataLoader(batch_sampler=itertools.islice(iter(loader.batch_sampler), count, None), **same))


def make_loader(
    settings: Config,
    device: torch.device,
    rank: int,
    dataset: Dataset | Sequence[Any],
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Iterable[Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    num_local_io_workers: int | None = None,
) -> Loader:
    """See `Engine.deepspeed_io`; `rank`: of `settings.world_size`. Raises ValueError for what does not fit."""
    if route not in ROUTES:
        raise ValueError(f"deepspeed_io(route=...): got {route!r}, wanted one of {', '.join(map(repr, ROUTES))}")
    world_size, size = settings.world_size, batch_size or settings.train_micro_batch_size_per_gpu
    if settings.zero.full_batch:  # of all ranks
        rank, world_size, size = 0, 1, size * world_size
    if route != "train" and data_sampler is None and not isinstance(dataset, IterableDataset):
        data_sampler = DistributedSampler(dataset, world_size, rank, shuffle=False)
    # Under the tree, a step must consist of the same micro-batches whatever the number of ranks.
    together = settings.zero.reduce == "tree" and route == "train" and data_sampler is None
    return Loader(
        dataset,
        batch_size=size,
        rank=rank,
        world_size=world_size,
        collate_fn=collate_fn,
        drop_last=settings.dataloader_drop_last,
        sampler=data_sampler,
        num_workers=num_local_io_workers or 0,
        pin_memory=pin_memory and device.type == "cuda",
        together=world_size * settings.gradient_accumulation_steps if together else None,
    )
