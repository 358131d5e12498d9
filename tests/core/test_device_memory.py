"""The promise: after the third step the allocator of a GPU never asks the device for memory again.

What the engine takes in a step goes back in it, in sizes and in an order that torch's allocator serves from what it
keeps, stream by stream: the full parameters, gradients and messages of a unit find those of an earlier one. Recorded
steps are replayed by a model of that allocator, as if all their tensors were larger, and with memory that other streams
have used handed on late. On a GPU the allocator itself says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caching_allocator import CachingAllocator, asked
from models import config, make_net, step
from recorded_steps import CUT, LONG, QUICK, Case, Recorded, record
from stream_order import Free, Keep, Take

import zero

STEPS, SETTLED = 8, 3
TIMES = 1 << 10, 1 << 13, 1 << 16, 3 * 5 * 7 << 10


@pytest.fixture(scope="module", params=["quick", pytest.param("long", marks=pytest.mark.long)])
def recorded(request, pool, tmp_path_factory) -> list[tuple[Case, Recorded]]:
    """Of rank 0."""
    found = []
    for world in (1, 2, 4):
        cases = [
            case for case in (QUICK[1::2] if request.param == "quick" else QUICK[::2] + LONG) if case.world == world
        ]
        if cases:
            done = pool.run(world, record, cases, str(tmp_path_factory.mktemp("files")), STEPS)[0]
            found += zip(cases, done, strict=True)
    return found


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("times", TIMES)
def test_the_device_is_asked_for_nothing_after_the_third_step(recorded, times, ahead):
    for case, (program, ends, held, _) in recorded:
        assert len(ends) == STEPS
        counts = asked(program, ends, held, times, ahead)
        assert sum(counts[:SETTLED]) > 0, case
        assert counts[SETTLED:] == [0] * (STEPS - SETTLED), case


def steps(*each: list[object]) -> tuple[list[object], list[int]]:
    program, ends = [], []
    for entries in each:
        program += entries
        ends.append(len(program))
    return program, ends


MB = 1 << 20


def test_what_grows_is_seen():
    same = [Take("main", "a", 1, 30 * MB), Take("main", "a", 2, 30 * MB), Free(1), Free(2)]
    assert asked(*steps(same, same, same), {}, 1, 0) == [2, 0, 0]
    larger = [[Take("main", "a", 1, (30 + 4 * number) * MB), Free(1)] for number in range(3)]
    assert asked(*steps(*larger), {}, 1, 0) == [1, 1, 1]
    kept = [[Take("main", "a", number, 30 * MB)] for number in range(3)]
    assert asked(*steps(*kept), {}, 1, 0) == [1, 1, 1]


def test_memory_goes_back_to_the_pool_of_its_stream_and_when_others_are_through_with_it():
    elsewhere = [Take("main", "b", 2, 30 * MB), Free(2)]
    here = [Take("main", "a", 1, 30 * MB), Free(1)]
    assert asked(*steps(here, elsewhere, here), {}, 1, 0) == [1, 1, 0]
    used = [[Take("main", "a", number, 30 * MB), Keep(number, "b"), Free(number)] for number in range(5)]
    found = [asked(*steps(*used), {}, 1, ahead) for ahead in (0, 1, 2)]
    assert found == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    twice = [[*one, *other] for one, other in zip(used, [*used[1:], used[0]], strict=True)]
    assert [sum(asked(*steps(*twice), {}, 1, ahead)) for ahead in (0, 1, 2)] == [1, 2, 4]


def test_pieces_are_cut_and_joined_again():
    allocator = CachingAllocator()
    whole = allocator.take("a", 40 * MB)
    allocator.give(whole)
    parts = [allocator.take("a", nbytes * MB) for nbytes in (10, 20, 8)]
    assert allocator.asked == [40 * MB] and [part.nbytes // MB for part in parts] == [10, 20, 8]
    for index in (0, 2, 1):
        allocator.give(parts[index])
    assert allocator.take("a", 40 * MB).nbytes == 40 * MB and len(allocator.asked) == 1
    assert allocator.take("a", 5).nbytes == 512 and allocator.asked[1:] == [2 * MB]
    assert allocator.take("a", 3 * MB).nbytes == 3 * MB and allocator.asked[2:] == [20 * MB]


def device_requests(settings: dict[str, Any]) -> list[int]:
    """Until the end of each step, of torch's own allocator."""
    engine, *_ = zero.initialize(model=make_net(width=1024), config=settings)
    counts = []
    for number in range(STEPS):
        step(engine, number)
        counts.append(torch.cuda.memory_stats()["num_device_alloc"])
    engine.destroy()
    return counts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
@pytest.mark.parametrize("case", [*(Case(1, stage, CUT if stage == 3 else {}) for stage in range(4)), *QUICK[-3:]])
def test_a_gpus_own_allocator_asks_for_nothing_either(pool, case):
    settings = config(case.stage, 1)
    settings["zero_optimization"] |= case.section
    for counts in pool.run(1, device_requests, settings):
        assert counts[-1] == counts[SETTLED - 1] > 0
