"""The promise: a pass is taken up behind its first batches; splits are one on all ranks; seeds reach all generators."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
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
