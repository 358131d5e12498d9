"""The promise: what streams of a GPU do beside each other in a step is ordered wherever they share memory.

Steps are recorded on CPU tensors with stand-ins for streams and for NCCL, and what was recorded is checked: as it is,
and with the waits of one place left out, which must not go unnoticed. And from the third step on, what a step takes has
the same sizes, in the pools of the same streams: torch's allocator, which keeps by size what each stream gave back, has
it all from then on.
"""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from recorded_steps import LONG, QUICK, STREAMED, Case, Recorded, record
from stream_order import Free, Launch, Program, Take, races, sites
from stream_recorder import Recorder
from torch import nn

import zero
from zero.memory.streams import Streams

NORM = "outcome.numbers (host)"
# Waits that something else makes needless where the host is in no hurry; without both, there must be a race.
BEHIND = [set(), {NORM}, {NORM, "shard.wait_copies (host)"}]
COMES = "up", "streamed_store._copy)"
REDUNDANT = {
    "norm.exact_norm (host)": "the read of the numbers would wait as well, but the watchdog could not name the ranks",
}


STEPS = 4  # of the cases whose memory is looked at; two of the others


def looked_at(cases: list[Case]) -> list[Case]:
    """Those whose memory is: not where a drive's pace decides what is read when."""
    return cases[1::2] if cases is QUICK else [case for case in cases[:-9:2] + cases[-9:] if not case.looks]


@pytest.fixture(scope="module", params=["quick", pytest.param("long", marks=pytest.mark.long)])
def recorded(request, pool, tmp_path_factory) -> list[tuple[Case, Recorded]]:
    """Of rank 0."""
    found, folder = [], str(tmp_path_factory.mktemp("files"))
    for cases in [QUICK] if request.param == "quick" else [QUICK, LONG]:
        for case in sorted(cases, key=lambda case: case.world):
            steps = STEPS if case in looked_at(cases) else 2
            found.append((case, pool.run(case.world, record, [case], folder, steps)[0][0]))
    return found


def test_nothing_is_used_on_two_streams_without_an_order(recorded):
    seen = set()
    for case, (program, _, _, priorities) in recorded:
        streams = {entry.stream for entry in program if isinstance(entry, Launch)}
        assert ("backend's gather" in streams) == (case.world > 1), case
        assert races(program) == [], case
        assert max(priorities) < 0, "what others wait for goes before what computes"
        seen |= streams
    assert seen >= {"computes", *Streams._fields}


def test_state_that_streams_comes_beside_the_backward(recorded):
    """Of the two units that the step updates first; of the others with their updates."""
    (found,) = (found for case, found in recorded if case == Case(1, 2, STREAMED))
    done = [(entry.stream, entry.what.split(" (")) for entry in found.program if isinstance(entry, Launch)]
    ends = ["computes", "embedding_dense_backward"]  # the backward
    kinds = ("b" if [stream, what[0]] == ends else "u" * ((stream, what[-1]) == COMES) for stream, what in done)
    assert "".join(kinds) == "uubuu" * len(found.ends), "of four units two, in each step"


def test_each_wait_that_is_left_out_is_found(recorded):
    # Two steps have them all.
    programs = [found.program[: found.ends[1]] for _, found in recorded]
    missed = set().union(*map(sites, programs))
    assert len(missed) > 4
    for program, behind in itertools.product(programs, BEHIND):
        known = set(races(program, behind))
        missed -= {site for site in missed & sites(program) if set(races(program, {site, *behind})) - known}
    assert missed <= set(REDUNDANT), "say why in REDUNDANT, or record a case that needs them"


def test_steps_take_the_same_memory(recorded):
    for case, (program, ends, held, _) in recorded:
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
        settled = each[2:]
        assert all(found == settled[0] and found[0] for found in settled), case
    assert sum(len(found.ends) == STEPS for _, found in recorded) >= len(QUICK) // 2


# --- a model on several streams ------------------------------------------------------------------------------


ENTERED: list[Any] = []  # for good: autograd would leave them at the end, where the loop's stream is current anyway


class Onto(torch.autograd.Function):
    """Autograd runs a backward on the stream of its forward: here this does it, with what comes into that."""

    @staticmethod
    def forward(ctx, x, stream, waits):
        ctx.way = stream, waits
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        stream, waits = ctx.way
        if waits:
            stream.wait_stream(torch.cuda.current_stream())
            grad.record_stream(stream)
        ENTERED.append(torch.cuda.stream(stream))
        ENTERED[-1].__enter__()
        return grad, None, None


class Branches(nn.Module):
    """Two layers of one unit, each on a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        streams = torch.cuda.current_stream(), torch.cuda.Stream(name="second branch")
        return sum(
            Onto.apply(layer(x), stream, stream is streams[1])
            for layer, stream in zip((self.first, self.second), streams, strict=True)
        ).sum()


def of_branches() -> Program:
    """Two steps of them, in a loop on a stream of its own."""
    recorder, json = Recorder(), {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
    with recorder.standing_in(), torch.cuda.stream(torch.cuda.Stream(name="first branch")):
        engine, *_ = zero.initialize(model=Branches(), config=json)
        with recorder.recording():
            for _ in range(2):
                engine.backward(engine(torch.ones(1, 4, device=engine.device)))
                engine.step()
        engine.destroy()
    return recorder.program


def test_gradients_that_wait_come_from_any_stream_of_a_model(pool):
    (program,) = pool.run(1, of_branches)
    assert {"first branch", "second branch"} <= {getattr(entry, "stream", "") for entry in program}
    assert races(program) == []
    assert races(program, {"reducer._arrived"}), "the wait, and what keeps the memory of the gradients"
