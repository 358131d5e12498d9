"""A run that is killed goes on from the last whole checkpoint, with the losses of the run that was not killed.

Two ranks save every step, asynchronously or not, and are killed, all of them or one, while they start, load, train or
save. Each attempt loads a whole checkpoint, never an older one than the last that was reported saved, or loaded.
`zero run --max_restarts` does it by itself.

6 kills; among the long tests 200 kills and 20 restarts.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import Launched, Launchers
from nodes import environment

HERE = Path(__file__).parents[1]


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


class Killed(NamedTuple):
    """The losses of the uninterrupted run by step, and what each attempt found."""

    kills: int
    losses: dict[str, str]
    attempts: list[dict[str, Any]]


@pytest.fixture(scope="module", params=[6, pytest.param(200, marks=pytest.mark.long)], ids="{} kills".format)
def killed(tmp_path_factory, request) -> Killed:
    kills = request.param
    # By that seed ranks are killed on each stage, all or one, in either kind of save, and once while they load.
    seed = 41 if kills == 6 else random.SystemRandom().randrange(10**6)
    alone = 50 if kills == 6 else 210  # steps of the uninterrupted run
    words = (tmp_path_factory.mktemp("kills"), kills, seed, alone)
    command = [sys.executable, str(HERE / "kills.py"), *map(str, words)]
    done = subprocess.run(
        command, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=450 + 10 * kills
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    losses, *attempts = map(json.loads, done.stdout.splitlines())
    print(f"{len(attempts)} kills, seed {seed}: {sum(one['torn'] for one in attempts)} in the middle of a save")
    return Killed(kills, dict(losses), attempts)


def test_each_attempt_loads_a_checkpoint_not_older_than_the_last_reported(killed):
    attempts = killed.attempts
    assert len(attempts) >= killed.kills
    for number, one in enumerate(attempts):
        assert not any(one["before"]), f"attempt {number} failed by itself: {one}"
        if one["began"] is not None:
            # A save may be whole before it is reported: the one that was running, and an asynchronous one before it.
            assert one["known"] <= one["began"] <= one["known"] + 2, one
    assert sum(one["began"] is not None for one in attempts) > len(attempts) / 2
    assert any(one["torn"] for one in attempts), "no kill came in the middle of a save"


def test_each_attempt_goes_on_with_the_losses_of_the_uninterrupted_run(killed):
    losses, attempts = killed.losses, killed.attempts
    for one in attempts:
        assert [int(step) for step, _ in one["losses"]] == [one["began"] + 1 + i for i in range(len(one["losses"]))]
        assert [loss for _, loss in one["losses"]] == [losses[step] for step, _ in one["losses"]], one
    assert sum(len(one["losses"]) for one in attempts) >= killed.kills


def launch(launchers: Launchers, folder: Path, ranks: int, steps: int, *options: str) -> Launched:
    folder.mkdir(exist_ok=True)
    program = [str(HERE / "recovering.py"), str(folder), str(steps), "2"]
    return launchers.start(
        "run", "--num_gpus", str(ranks), *options, *program, environment=environment(OMP_NUM_THREADS="1")
    )


def ended(process: Launched, restarts: int = 0) -> str:
    with process:
        _, said = process.communicate(240 + 30 * restarts)
    assert process.returncode == 0, said
    return said


def kill_some_rank(process: Launched, folder: Path, attempt: int, draw: random.Random) -> None:
    """In the given attempt, as soon as it has run a few steps."""
    wanted, end = draw.randint(1, 4), time.monotonic() + 240
    while sum(line[0] == str(attempt) for line in lines(folder / "losses")) < wanted:
        assert process.poll() is None and time.monotonic() < end, process.texts()
        time.sleep(0.005)
    time.sleep(0.05 * draw.random())
    pids = dict(lines(folder / f"pids-{attempt}"))
    os.kill(int(pids[draw.choice(sorted(pids))]), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("killed", [200], indirect=True)
def test_zero_run_recovers_from_kills_by_itself_and_a_smaller_world_goes_on_from_there(launchers, killed, tmp_path):
    restarts, losses = 20, killed.losses
    draw, steps = random.Random(restarts), 10 * restarts
    here = tmp_path / "killed"
    process = launch(launchers, here, 2, steps, "--max_restarts", str(restarts))
    for attempt in range(restarts):
        kill_some_rank(process, here, attempt, draw)
    said = [line for line in ended(process, restarts).splitlines() if line.startswith("zero run: rank")]
    assert len(said) == restarts
    for number, line in enumerate(said, start=1):
        wanted = r"zero run: rank \d was killed by SIGKILL \(the kernel does that when memory runs out\), pid \d+; "
        assert re.fullmatch(wanted + f"restart {number} of {restarts}", line), line
    # Some steps ran twice, because the kill came before they were saved; every time with the same loss.
    found = [line[1:] for line in lines(here / "losses")]
    assert {int(step) for step, _ in found} == set(range(1, steps + 1))
    assert all(loss == losses[step] for step, loss in found)
    assert lines(here / "saved")[-1] == [str(steps)]

    # One rank instead of two: twice the micro-batches for a step, and the same steps.
    ended(launch(launchers, here, 1, steps + 4))
    found = [line[1:] for line in lines(here / "losses")[-4:]]
    assert found == [[str(step), losses[str(step)]] for step in range(steps + 1, steps + 5)]
