"""The promise: a resumed pass goes on with the next unseen sample, however it is dealt out from there on.

No sample of the pass is skipped or comes twice, but those that fill up its end, after any number of resumes at other
world sizes and batch sizes; with the same ones the batches are those of the run that was not interrupted.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import Numbers, Stream, samples
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from zero.data import Loader, RepeatingLoader

DEALINGS = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))  # world size, batch size, batches read


def ranks(
    dataset: Any, world: int, size: int, state: Any = None, together: int | None = None, **more: Any
) -> list[Loader]:
    """The loaders of all ranks, resumed by a state that went through JSON."""
    together = together and together * world
    made = [
        Loader(dataset, batch_size=size, rank=rank, world_size=world, together=together, **more)
        for rank in range(world)
    ]
    for loader in made if state is not None else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    return made


def read(loaders: list[Loader], batches: int | None, whole: bool) -> list[int]:
    """What all ranks get in their next batches, in the order in which it was dealt out."""
    dealt = [[samples([batch]) for batch in itertools.islice(loader, batches)] for loader in loaders]
    assert len({len(rank) for rank in dealt}) == 1
    turns = zip(*dealt, strict=True)
    if whole:
        return [sample for turn in turns for batch in turn for sample in batch]
    return [sample for turn in turns for row in zip(*turn, strict=True) for sample in row]


def pass_of(dataset: Any, dealings: list[tuple[int, int, int]], together: int | None, **more: Any) -> list[int]:
    """A whole pass that is resumed at each of the dealings, in the order in which it was dealt out."""
    state, found = None, []
    for index, (world, size, batches) in enumerate(dealings):
        loaders = ranks(dataset, world, size, state, together, **more)
        if loaders[0].epoch == 1:
            return found
        found += read(loaders, None if index == len(dealings) - 1 else batches, together is not None)
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
        assert len(json.dumps(state)) < 400
    return found


@settings(deadline=None, max_examples=200)
@given(
    count=st.integers(1, 60),
    dealings=st.lists(DEALINGS, min_size=1, max_size=4),
    together=st.none() | st.integers(1, 3),
    drop_last=st.booleans(),
    seed=st.integers(0, 2),
)
def test_every_sample_of_a_pass_comes_once_however_it_is_dealt_out(count, dealings, together, drop_last, seed):
    dataset = Numbers(count)
    order = pass_of(dataset, [(1, 1, 0)], None, seed=seed)
    found = pass_of(dataset, dealings, together, drop_last=drop_last, seed=seed)
    assert found == [order[at % count] for at in range(len(found))]
    step = max(world * size * (together or 1) for world, size, _ in dealings)
    if drop_last:
        # A batch that its own run would have dropped is all that may be missing.
        assert count - step < len(found) < count + 4
    else:
        assert count <= len(found) < count + max(step, 4)


@settings(deadline=None, max_examples=100)
@given(
    count=st.integers(1, 60),
    dealing=DEALINGS,
    parts=st.lists(st.integers(0, 4), max_size=4),
    together=st.none() | st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_dealt_out_as_before_it_is_the_run_that_was_not_interrupted(count, dealing, parts, together, drop_last):
    world, size, _ = dealing
    rank, dataset = world - 1, Numbers(count)
    more = {"together": together, "drop_last": drop_last}
    wanted = list(map(samples_of, ranks(dataset, world, size, **more)[rank]))
    found, state = [], None
    for part in [*parts, None]:
        loader = ranks(dataset, world, size, state, **more)[rank]
        if loader.epoch == 1:
            break
        found += map(samples_of, itertools.islice(loader, part))
        state = loader.state_dict()
    assert found == wanted


def samples_of(batch: Any) -> list[int]:
    return samples([batch])


@settings(deadline=None, max_examples=100)
@given(count=st.integers(0, 60), dealings=st.lists(DEALINGS, min_size=1, max_size=4), together=st.none() | st.just(2))
def test_items_of_an_iterable_dataset_come_once(count, dealings, together):
    found = pass_of(Stream(count), dealings, together)
    assert found == list(range(len(found)))
    turn = max(world * (together * size if together else 1) for world, size, _ in dealings)
    assert count - turn < len(found) <= count, "more is missing than what did not go round"


class Parted(IterableDataset):
    """Items that the workers share; worker 0 has few of them."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        return iter(range(6)) if info.id == 0 else iter(range(100, 130))


@pytest.mark.parametrize("world", [1, 2])
def test_workers_of_an_iterable_dataset_go_on_each_where_it_was(world):
    dataset = Parted()
    wanted = samples(ranks(dataset, 2, 2, num_workers=2)[0])
    before = ranks(dataset, 2, 2, num_workers=2)
    dealt = [samples(itertools.islice(loader, 5)) for loader in before]  # worker 0 has ended
    after = ranks(dataset, world, 2 if world == 2 else 3, before[0].state_dict(), num_workers=2)
    rest = [samples(loader) for loader in after]
    assert sorted(itertools.chain(*dealt, *rest)) == [*range(6), *range(100, 130)]
    if world == 2:
        assert dealt[0] + rest[0] == wanted


class Draw(Dataset):
    """Samples that are drawn at random by each of the generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.random()], dtype=torch.float64)


def test_what_workers_draw_is_that_of_the_run_that_was_not_interrupted():
    (whole,) = ranks(Draw(), 1, 4, num_workers=2)
    wanted = list(whole)
    (before,) = ranks(Draw(), 1, 4, num_workers=2)
    found = list(itertools.islice(before, 3))
    (after,) = ranks(Draw(), 1, 4, before.state_dict(), num_workers=1)
    found += list(after)
    assert torch.equal(torch.stack(found), torch.stack(wanted))
    drawn = torch.cat([torch.cat(found), torch.cat(list(after))])[:, 1:]
    assert len(drawn.flatten().unique()) == drawn.numel() == 2 * 24 * 3


def test_a_sampler_of_the_user_goes_on_in_its_own_order():
    indices = [9, 1, 5, 3, 3, 7, 2]
    before = ranks(Numbers(10), 2, 2, sampler=indices)
    assert samples(itertools.islice(before[0], 1)) == [9, 1]
    for size in (2, 3):
        after = ranks(Numbers(10), 2, size, before[0].state_dict(), sampler=indices)
        assert samples(after[1]) == indices[2:]


def warnings_of(caplog: Any, loader: Loader, state: Any) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="zero"):
        loader.load_state_dict(state)
    return caplog.text


def test_what_cannot_be_exact_is_said(caplog):
    (sampled,) = ranks(Numbers(8), 1, 2, sampler=list(range(8)))
    samples(itertools.islice(sampled, 2))
    (dealt,) = ranks(Numbers(8), 1, 2)
    samples(itertools.islice(dealt, 2))
    (stream,) = ranks(Stream(8), 1, 2)
    samples(itertools.islice(stream, 2))

    share = ranks(Numbers(8), 2, 2, sampler=[0, 2, 4, 6])[0]
    assert "each of 1 ranks had a sampler" in warnings_of(caplog, share, sampled.state_dict())
    assert samples(share) == [4, 6]
    assert "from a sampler, now from a dealt" in warnings_of(caplog, ranks(Numbers(8), 1, 2)[0], sampled.state_dict())
    assert "8 samples" in warnings_of(caplog, ranks(Numbers(9), 1, 2)[0], dealt.state_dict())
    two = ranks(Stream(8), 1, 2, num_workers=2)[0]
    assert "1 worker read" in warnings_of(caplog, two, stream.state_dict())
    assert warnings_of(caplog, ranks(Numbers(8), 2, 3)[0], dealt.state_dict()) == ""
    with pytest.raises(ValueError, match="wanted what its state_dict"):
        dealt.load_state_dict({"epoch": 0, "samples": 8})


def test_a_position_that_is_loaded_ends_the_pass_that_runs():
    (loader,) = ranks(Numbers(12), 1, 2)
    repeating = RepeatingLoader(loader)
    first = [samples([next(repeating)]) for _ in range(2)]
    state = loader.state_dict()
    third = samples([next(repeating)])
    next(repeating)
    loader.load_state_dict(state)
    assert samples([next(repeating)]) == third and first[0] != third
    assert repeating.state_dict() == loader.state_dict()
    repeating.load_state_dict(state)
    assert samples([next(repeating)]) == third


def test_a_position_that_is_loaded_before_the_first_batch_is_where_the_pass_begins():
    (loader,) = ranks(Numbers(12), 1, 2)
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    rest = [samples([batch]) for batch in running]
    (other,) = ranks(Numbers(12), 1, 2)
    begun = iter(other)
    other.load_state_dict(state)
    assert [samples([batch]) for batch in begun] == rest
    assert other.epoch == loader.epoch == 1
