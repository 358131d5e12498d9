"""The promise: dealt whole, the micro-batches of an optimizer step are the same for any number of ranks.

So are the passes, their ends, and a position saved at one number of ranks and loaded at another.
"""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import Numbers, SizedStream, Stream, loaders, samples

from zero.data import Loader


def steps(ranks: list[Loader], together: int, skip: int = 0) -> list[list[list[int]]]:
    """The rest of a pass as steps: micro-batches in their order over ranks and micro-steps."""
    dealt = [[samples([batch]) for batch in rank] for rank in ranks]
    order = [batch for turn in zip(*dealt, strict=True) for batch in turn]
    return [order[at : at + together] for at in range(0, len(order), together)]


@settings(deadline=None)
@given(count=st.integers(1, 70), size=st.integers(1, 5), drop_last=st.booleans())
def test_every_pass_is_the_same_at_any_world_size(count, size, drop_last):
    passes = {}
    for world in (1, 2, 4):
        ranks = loaders(count, world, size, drop_last=drop_last, together=4)
        assert len({len(rank) for rank in ranks}) == 1
        passes[world] = [steps(ranks, 4) for _ in range(2)]
        assert len(ranks[0]) * world == 4 * len(passes[world][0])
    assert passes[1] == passes[2] == passes[4]
    for found in passes[1]:
        assert all(len(step) == 4 and all(len(batch) == size for batch in step) for step in found)
        whole = list(itertools.chain(*itertools.chain(*found)))
        assert len(whole) == count // (4 * size) * 4 * size if drop_last else set(whole) == set(range(count))
    if count >= 20 * size:
        assert passes[1][0] != passes[1][1], "two passes had one order"


def test_an_iterable_dataset_is_dealt_whole():
    for world in (1, 2, 4):
        ranks = [Loader(SizedStream(30), batch_size=2, rank=r, world_size=world, together=4) for r in range(world)]
        assert all(len(rank) == 12 // world for rank in ranks)
        assert steps(ranks, 4) == [[[8 * s + 2 * b, 8 * s + 2 * b + 1] for b in range(4)] for s in range(3)]
    resumed = Loader(Stream(30), batch_size=2, rank=1, world_size=2, together=4)
    seen = Loader(Stream(30), batch_size=2, rank=3, world_size=4, together=4)
    samples(itertools.islice(seen, 1))
    resumed.load_state_dict(seen.state_dict())
    assert samples(resumed) == [10, 11, 14, 15, 18, 19, 22, 23]


def test_a_step_that_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match=re.escape("together: got 4; wanted a multiple of the world size 3")):
        Loader(Numbers(9), batch_size=1, rank=0, world_size=3, together=4)
