"""The promise: what streams of a GPU do beside each other in a step is ordered wherever they share memory.

Steps are recorded on CPU tensors with stand-ins for streams and for NCCL, and what was recorded is checked: as it is,
and with the waits of one place left out, which must not go unnoticed.
"""

from __future__ import annotations

import itertools

import pytest
from recorded_steps import LONG, QUICK, STREAMED, Case, record
from stream_order import Launch, Program, races, sites

from zero.memory.streams import Streams

NORM = "outcome.numbers (host)"
# Waits that something else makes needless where the host is in no hurry; without both, there must be a race.
BEHIND = [set(), {NORM}, {NORM, "shard.wait_copies (host)"}]
COMES = "up", "streamed_store._copy)"
REDUNDANT = {
    "norm.exact_norm (host)": "the read of the numbers would wait as well, but the watchdog could not name the ranks",
}


@pytest.fixture(scope="module", params=["quick", pytest.param("long", marks=pytest.mark.long)])
def recorded(request, pool, tmp_path_factory) -> list[tuple[Case, Program, list[int]]]:
    """Of rank 0."""
    found = []
    for world in (1, 2, 4):
        cases = [case for case in (QUICK if request.param == "quick" else QUICK + LONG) if case.world == world]
        if cases:
            done = pool.run(world, record, cases, str(tmp_path_factory.mktemp("files")))[0]
            found += [(case, each.program, each.priorities) for case, each in zip(cases, done, strict=True)]
    return found


def test_nothing_is_used_on_two_streams_without_an_order(recorded):
    seen = set()
    for case, program, priorities in recorded:
        streams = {entry.stream for entry in program if isinstance(entry, Launch)}
        assert ("backend's gather" in streams) == (case.world > 1), case
        assert races(program) == [], case
        assert max(priorities) < 0, "what others wait for goes before what computes"
        seen |= streams
    assert seen >= {"computes", *Streams._fields}


def test_state_that_streams_comes_beside_the_backward(recorded):
    """Of the two units that the step updates first; of the others with their updates."""
    programs = [program for case, program, _ in recorded if case == Case(1, 2, STREAMED)]
    for program in programs:
        done = [(entry.stream, entry.what.split(" (")) for entry in program if isinstance(entry, Launch)]
        ends = ["computes", "embedding_dense_backward"]  # the backward
        kinds = ("b" if [stream, what[0]] == ends else "u" * ((stream, what[-1]) == COMES) for stream, what in done)
        assert "".join(kinds) == "uubuu" * 2, "of four units two, in each step"
    assert programs


def test_each_wait_that_is_left_out_is_found(recorded):
    programs = [program for _, program, _ in recorded]
    missed = set().union(*map(sites, programs))
    assert len(missed) > 4
    for program, behind in itertools.product(programs, BEHIND):
        known = set(races(program, behind))
        missed -= {site for site in missed & sites(program) if set(races(program, {site, *behind})) - known}
    assert missed <= set(REDUNDANT), "say why in REDUNDANT, or record a case that needs them"
