"""The promise: a pass is taken up behind its first batches; splits are one on all ranks; seeds reach all generators."""

from __future__ import annotations

import itertools
import os
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from models import config
from ranks import listening
from test_data import Numbers, SizedStream, loaders, samples

import zero
from zero.data import Loader, RepeatingLoader


@pytest.mark.parametrize("count", [0, 3, 6, 9])
def test_the_first_batches_of_one_pass_are_left_out_unread(count: int) -> None:
    (whole,), (loader,) = loaders(23, 1, 4), loaders(23, 1, 4)
    wanted = [samples([batch]) for batch in whole]
    after = samples(whole)
    loader.dataset.read.clear()
    assert [samples([batch]) for batch in zero.skip_first_batches(loader, count)] == wanted[count:]
    assert len(loader.dataset.read) == max(0, 23 - 4 * count)
    assert samples(loader) == after, "the pass behind it is not whole"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", [{}, {"shuffle": True}, {"batches": True}])
def test_a_loader_of_torch_does_not_read_what_it_skips(how: dict, workers: int) -> None:
    def loader() -> torch.utils.data.DataLoader:
        if how.get("batches"):
            batches = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(range(10)), 3, False)
            return torch.utils.data.DataLoader(Reads(10), batch_sampler=batches, num_workers=workers)
        return torch.utils.data.DataLoader(Reads(10), 3, num_workers=workers, **how)

    torch.manual_seed(4)
    one, after = loader(), torch.get_rng_state()
    whole = [list(one), list(one)]
    drawn = torch.get_rng_state()
    torch.set_rng_state(after)
    other = loader()
    batches = [list(zero.skip_first_batches(other, 2)), list(other)]
    assert torch.equal(torch.get_rng_state(), drawn)
    found, wanted = ([[batch[0].tolist() for batch in each] for each in every] for every in (batches, whole))
    assert found == [wanted[0][2:], wanted[1]]
    read = [count for _, count in batches[0]]
    assert int(read[0][0]) == 1, "it read what it skipped"


class Reads(Numbers):
    """Each sample with the number of reads so far, in its process."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        super().__getitem__(index)
        return index, len(self.read)


def test_a_loop_sets_the_epoch_in_the_sampler_as_it_does_with_torchs_loader() -> None:
    loader, other = (Loader(Numbers(20), batch_size=4, rank=0, world_size=2) for _ in range(2))
    passes = [samples(other) for _ in range(5)]
    for epoch in (2, 0, 1, 4):
        loader.sampler.set_epoch(epoch)
        assert samples(loader) == passes[epoch]
    loader.set_epoch(3)
    assert samples(loader) == passes[3]
    loader.sampler.set_epoch(1)
    assert samples(zero.skip_first_batches(loader, 1)) == passes[1][4:]
    assert samples(loader) == passes[2], "without a word of the loop passes are numbered on"
    assert samples(Loader(Numbers(20), batch_size=4, rank=0, world_size=2, seed=1)) != passes[0]


def test_streams_and_loaders_of_others_are_read_and_dropped() -> None:
    stream = Loader(SizedStream(12), batch_size=2, rank=0, world_size=1)
    assert samples(zero.skip_first_batches(stream, 4)) == [8, 9, 10, 11]
    assert samples(stream) == list(range(12))
    assert samples(zero.skip_first_batches(torch.utils.data.DataLoader(Numbers(6), 2), 1)) == [2, 3, 4, 5]
    endless = zero.skip_first_batches(RepeatingLoader(torch.utils.data.DataLoader(Numbers(4), 2)), 3)
    assert next(endless).tolist() == [2, 3]
    for wrong in (-1, 1.0, True):
        with pytest.raises(ValueError, match=re.escape(f"got {wrong!r}, wanted an integer of at least 0")):
            zero.skip_first_batches(stream, wrong)


def test_a_split_depends_on_its_seed_alone() -> None:
    parts = zero.random_split(range(50), [40, 10])
    torch.manual_seed(99)
    assert [list(part) for part in parts] == [list(part) for part in zero.random_split(range(50), [0.8, 0.2])]
    assert sorted(itertools.chain(*parts)) == list(range(50))
    assert list(zero.random_split(range(50), [40, 10], seed=1)[0]) != list(parts[0])


def split_by_torch(seeds: list[int]) -> list[str]:
    """What initialize says of a split that each rank makes by torch, with a seed of its own."""
    torch.manual_seed(seeds[int(os.environ["RANK"])])
    train, _ = torch.utils.data.random_split(torch.utils.data.TensorDataset(torch.rand(40, 2)), [30, 10])
    with listening() as said:
        zero.initialize(model=torch.nn.Linear(2, 2), config=config(0, 2), training_data=train)[0].destroy()
    return [text for text in said if "random_split" in text]


def test_a_split_that_differs_between_ranks_is_said_once(pool: Any) -> None:
    first, second = pool.run(2, split_by_torch, [1, 2])
    assert len(first) == 1 and not second and "is the same on all" in first[0]
    assert pool.run(2, split_by_torch, [1, 1]) == [[], []]


def drawn() -> list[Any]:
    return [random.random(), np.random.random(), torch.rand(3).tolist()]


def test_a_seed_reaches_every_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zero.seed_everything(7) == 7
    first = drawn()
    assert len({first[0], first[1], first[2][0]}) == 3
    monkeypatch.setenv("RANK", "1")
    zero.seed_everything(7)
    assert drawn() == first, "ranks draw alike unless they are told otherwise"
    zero.seed_everything(7, by_rank=True)
    second = drawn()
    assert all(one != other for one, other in zip(first, second, strict=True))
    monkeypatch.setenv("RANK", "2")
    zero.seed_everything(7, by_rank=True)
    assert drawn() != second
    for wrong in (-1, 2**63, "7", None, True):
        with pytest.raises(ValueError, match="wanted an integer from 0 to"):
            zero.seed_everything(wrong)
