"""The promise: when ranks part company, the others say which rank, and over which unit, and end. Nothing hangs.

Real processes, which can be killed and stopped; tests/divergence.py is the program. All cases run side by side.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import divergence
import pytest
from divergence import CASES, TIMEOUT, WORLD
from nodes import environment

from zero.watchdog.hang_detector import SAYS, TICK

LINE = re.compile(r"warning: rank (\d) has waited for the (.+? of unit '.+?') \(#\d+\) for (\d+\.\d) s")
LAST = re.compile(r"has waited for the .+ \(#\d+\) for (\d+\.\d) s.*, the time-out \(zero\.timeout\)")
UNIT = re.compile(r"waited for the (gather|reduce) of unit '(<root>|embed|head|blocks\.\d)' \(#\d+\)")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int | None, str]]:
    """Exit code (None: had to be killed at the end) and output by case and rank, as `kill-0`."""
    folder = tmp_path_factory.mktemp("divergence")
    command = [sys.executable, divergence.__file__, str(folder)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr
    codes = json.loads((folder / "codes.json").read_text())
    names = [f"{name}-{rank}" for name in CASES for rank in range(WORLD)]
    said = {name: (folder / f"{name}.txt").read_text() for name in names}
    # Torch puts its rank in front of the lines of an exception that nobody caught.
    return {name: (codes.get(name), re.sub(r"(?m)^\[rank\d\]: ", "", said[name])) for name in names}


def others(name: str, outcome: dict[str, tuple[int | None, str]]) -> list[tuple[int, str, str]]:
    """Of every rank that did nothing wrong: its number, all it said, and its last error, which must be a RuntimeError.

    Each has ended by itself with exit code 1.
    """
    found = []
    for rank in range(WORLD):
        if rank != CASES[name].rank:
            code, said = outcome[f"{name}-{rank}"]
            assert code == 1, f"{name}-{rank}: {code}\n{said}"
            errors = [line for line in said.splitlines() if line.startswith("zero.errors.Parted: ")]
            assert errors, said
            found.append((rank, said, errors[-1]))
    return found


def test_a_killed_rank_is_named(outcome: dict[str, tuple[int | None, str]]) -> None:
    assert outcome["kill-2"][0] == -9
    for _, _, error in others("kill", outcome):
        assert "rank 2 gone: not heard of for" in error
        assert UNIT.search(error), error


def test_a_killed_rank_is_named_when_the_store_dies_with_it(outcome: dict[str, tuple[int | None, str]]) -> None:
    for _, _, error in others("kill_keeper", outcome):
        assert "rank 0 is stopped or dead, and with it the store" in error
        assert UNIT.search(error), error


@pytest.mark.parametrize(
    ("name", "blamed"),
    [
        ("stop", r"rank 2(:| gone:) not heard of for"),
        ("stop_keeper", "rank 0 is stopped or dead, and with it the store"),
    ],
)
def test_a_stopped_rank_is_named_while_it_is_waited_for_and_at_the_time_out(
    name: str, blamed: str, outcome: dict[str, tuple[int | None, str]]
) -> None:
    waited = []
    for rank, said, error in others(name, outcome):
        lines = [line for line in said.splitlines() if (found := LINE.search(line)) and int(found[1]) == rank]
        # On a busy machine there may be lines about waits before, which ended.
        assert any(re.search(blamed, line) for line in lines), said
        # Whoever gives up first names the others.
        assert re.search(blamed, error) or f"rank {CASES[name].rank} gave up for want of ranks" in error, error
        assert UNIT.search(error), error
        waited += [float(ended[1]) for ended in LAST.finditer(error)]
    # Each rank counts its own wait; the first to end takes along the others, who may have come to it later.
    assert waited and max(waited) >= TIMEOUT - 1.0


def test_a_rank_that_does_not_come_to_a_block_of_init_is_waited_for_until_the_time_out(
    outcome: dict[str, tuple[int | None, str]],
) -> None:
    for _, _, error in others("build", outcome):
        assert "rank 2: never heard of" in error or "gave up for want of ranks" in error, error


def test_the_first_line_is_due_before_5_s_have_passed() -> None:
    assert SAYS + TICK < 5.0 < TIMEOUT


def test_ranks_that_wait_for_each_other_do_not_wait_for_the_time_out(
    outcome: dict[str, tuple[int | None, str]],
) -> None:
    for _, said, error in others("skip", outcome):
        assert "ranks 0-2 run different parts of the program; ranks 0-2 wait for each other, and nothing can" in error
        assert "rank 2: waiting for the gather of unit 'blocks.2'" in error or "gave up for want of ranks" in error
        assert not LAST.search(said)


def test_the_diverging_rank_itself_says_where_the_others_are(outcome: dict[str, tuple[int | None, str]]) -> None:
    code, said = outcome["skip-2"]
    assert code == 1
    # On a busy machine it may hear of one of them later than of the other, or that one has noticed it before.
    assert re.search(
        r"rank(s 0, 1| 0| 1): waiting for the gather of unit 'blocks.1'|gave up for want of ranks", said
    ), said
    assert "make the module around these blocks a leaf (zero_optimization.leaf_module) or name it in zero.units" in said


@pytest.mark.parametrize("name", ["raise", "raise_keeper"])
def test_a_rank_that_raised_is_quoted(name: str, outcome: dict[str, tuple[int | None, str]]) -> None:
    odd = CASES[name].rank
    for _, said, error in others(name, outcome):
        assert f"rank {odd} raised ValueError: bad sample 17 in forward" in error
        assert UNIT.search(error), error
        assert not LAST.search(said), "it waited for the time-out"
    code, said = outcome[f"{name}-{odd}"]
    assert code == 1
    assert said.rstrip().splitlines()[-1].startswith("ValueError: bad sample 17"), said


def test_a_rank_that_left_its_program_is_named(outcome: dict[str, tuple[int | None, str]]) -> None:
    assert outcome["leave-2"][1].rstrip().splitlines()[-1].startswith("KeyError"), outcome["leave-2"][1]
    for _, said, error in others("leave", outcome):
        assert "rank 2 has ended its program with KeyError: 'the data set has no such sample' after 3 steps" in error
        assert UNIT.search(error), error
        assert not LAST.search(said), "it waited for the time-out"


def test_a_rank_that_went_on_alone_is_named(outcome: dict[str, tuple[int | None, str]]) -> None:
    assert outcome["alone-2"][0] == 1
    for _, _, error in others("alone", outcome):
        assert re.search(r"rank 2\b.*ValueError: bad sample 17 in forward", error), error
        assert UNIT.search(error), error


def test_a_slow_rank_is_asked_where_it_is_and_waited_for(outcome: dict[str, tuple[int | None, str]]) -> None:
    said = [outcome[f"slow-{rank}"] for rank in range(WORLD)]
    assert [code for code, _ in said] == [0, 0, 0], said
    for rank in (0, 1):
        assert re.search(rf"rank {rank} has waited for the .*; .*rank 2: computing in forward", said[rank][1])
    assert "rank 2 is waited for by ranks 0, 1" in said[2][1]
    assert "Parted" not in "".join(text for _, text in said)
