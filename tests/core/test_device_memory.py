"""The promise: from the third step on steps take the same memory, and a GPU's allocator asks the device for nothing.

What is taken has the same sizes, in the pools of the same streams, and as much of it goes back as in any other step. So
torch's allocator, which keeps by size what each stream gave back, has it all from then on; on a GPU it says so itself.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import make_net
from recorded_steps import CUT, LONG, QUICK, Case, Recorded, record
from scenario import Model, run
from stream_order import Free, Take

STEPS, SETTLED = 6, 3


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
    for case, (program, ends, held, _) in recorded:
        assert len(ends) == STEPS
        sizes, each = dict(held), []
        for start, end in pairwise([0, *ends]):
            taken: Counter = Counter()
            for entry in program[start:end]:
                if isinstance(entry, Take):
                    taken[entry.stream, entry.nbytes] += 1
                    sizes[entry.buffer] = entry.nbytes
                elif isinstance(entry, Free):
                    sizes.pop(entry.buffer, None)
            each.append((taken, sum(sizes.values())))
        (taken, _), *_ = settled = each[2:]
        assert taken and settled == [settled[0]] * (STEPS - 2), case


def device_requests(engine: Any, number: int) -> int:
    """Until now, of torch's own allocator."""
    torch.cuda.synchronize()  # so that memory which other streams have used is handed on in the next step
    return torch.cuda.memory_stats()["num_device_alloc"]


@pytest.mark.gpu
@pytest.mark.ranks(1)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
@pytest.mark.parametrize("case", [*(Case(1, stage, CUT if stage == 3 else {}) for stage in range(4)), *QUICK[-3:-1]])
def test_a_gpus_own_allocator_asks_for_nothing_either(case):
    model = Model(lambda: make_net(width=1024))
    counts = run(model, {"stage": case.stage, "section": case.section or {}}, STEPS, watch=device_requests).seen
    assert counts[-1] == counts[SETTLED] > 0
