"""The promise: from the third step on steps take the same memory, and a GPU's allocator asks the device for nothing.

What is taken has the same sizes, in the pools of the same streams, and goes back. So torch's allocator, which keeps by
size what each stream gave back, has it all from then on. Recorded steps are replayed by a model of that allocator, as
if all their tensors were larger, and with memory that other streams have used handed on a step later. On a GPU the
allocator itself says so.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from caching_allocator import CachingAllocator, asked
from models import config, make_net, step
from recorded_steps import CUT, LONG, QUICK, Case, Recorded, record
from stream_order import Free, Keep, Take

import zero

STEPS, SETTLED = 6, 3
TIMES = 1 << 10, 1 << 13, 1 << 16, 3 * 5 * 7 << 10


@pytest.fixture(scope="module", params=["quick", pytest.param("long", marks=pytest.mark.long)])
def recorded(request, pool, tmp_path_factory) -> list[tuple[Case, Recorded]]:
    """Of rank 0."""
    found, folder = [], str(tmp_path_factory.mktemp("files"))
    # Without those in which a drive's pace decides what is read when.
    cases = QUICK[1::2] if request.param == "quick" else [case for case in LONG[:-9:2] + LONG[-9:] if not case.looks]
    for case in sorted(cases, key=lambda case: case.world):
        found.append((case, pool.run(case.world, record, [case], folder, STEPS)[0][0]))
    return found


def test_steps_take_the_same_memory(recorded):
    for case, (program, ends, _, _) in recorded:
        assert len(ends) == STEPS
        taken = [
            Counter((entry.stream, entry.nbytes) for entry in program[start:end] if isinstance(entry, Take))
            for start, end in pairwise(ends[1:])
        ]
        assert all(taken) and taken == [taken[0]] * (STEPS - 2), case


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("times", TIMES)
def test_the_device_is_asked_for_nothing_more(recorded, times, ahead):
    for case, (program, ends, held, _) in recorded:
        counts = asked(program, ends, held, times, ahead)
        settled = SETTLED + ahead
        assert sum(counts[:settled]) > 0, case
        assert sum(counts[settled:]) == 0, (case, counts)


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
        torch.cuda.synchronize()  # so that memory which other streams have used is handed on in the next step
        counts.append(torch.cuda.memory_stats()["num_device_alloc"])
    engine.destroy()
    return counts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
@pytest.mark.parametrize("case", [*(Case(1, stage, CUT if stage == 3 else {}) for stage in range(4)), *QUICK[-3:-1]])
def test_a_gpus_own_allocator_asks_for_nothing_either(pool, case):
    settings = config(case.stage, 1)
    settings["zero_optimization"] |= case.section
    for counts in pool.run(1, device_requests, settings):
        assert counts[-1] == counts[SETTLED] > 0
