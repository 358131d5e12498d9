"""Kills training runs at random moments, attempt after attempt, and says what each found; for `test_recovery.py`.

    python kills.py FOLDER KILLS SEED STEPS

A process of its own, which imports torch once and forks two ranks for each attempt while it has no thread. It prints
one line of JSON for the losses of the run that nobody interrupts (STEPS steps), then one for each attempt.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it when they are made; it takes longer than an attempt
import torch.distributed as dist
from recovering import Run, go

import zero.engine.initialize  # noqa: F401 - the children inherit it

WORLD = 2
STEPS = 40  # of one run; when it is through, the next one begins in an empty folder
SECONDS = 60  # an attempt that takes longer hangs


def child(rank: int, store: Path, run: Run) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", store=dist.FileStore(str(store), WORLD), rank=rank, world_size=WORLD)
    go(run)


def start(run: Run) -> list[int]:
    """The ranks of one attempt."""
    store = run.folder / f"store-{run.attempt}"
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                handle = os.open(run.folder / f"said-{run.attempt}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                os.dup2(handle, 1)
                os.dup2(handle, 2)
                child(rank, store, run)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
    return pids


def wait(pids: list[int]) -> list[int]:
    """Exit codes; of a rank that a signal killed, minus its number."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def ended(pids: list[int]) -> list[int]:
    """Exit codes of the ranks that have ended by now; they are left for `wait`."""
    found = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids]
    return [one.si_status for one in found if one is not None]


def sleep_until(ready: Callable[[], bool], pids: list[int]) -> None:
    """Returns as soon as `ready`, or a rank ended by itself, or after SECONDS."""
    end = time.monotonic() + SECONDS
    while not ready() and not ended(pids) and time.monotonic() < end:
        time.sleep(0.002)


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def kill(pids: list[int], victims: list[int], pause: float) -> None:
    """The victims at once; the others, who may go on without them for a while, after `pause` seconds."""
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    time.sleep(pause)
    for pid in set(pids) - set(victims):
        os.kill(pid, signal.SIGKILL)


def torn(checkpoints: Path) -> bool:
    """Whether there are files that no whole checkpoint has: the kill came in the middle of a save."""
    for tag in filter(Path.is_dir, checkpoints.glob("*")):
        index = tag / "index.json"
        known = json.loads(index.read_text())["files"] if index.exists() else ()
        if {path.name for path in tag.iterdir()} - {"index.json", *known}:
            return True
    return any(checkpoints.glob(".*"))


def attempt(run: Run, draw: random.Random) -> dict[str, Any]:
    """One attempt, killed somewhere: while it starts and loads, or while it trains and saves."""
    # What was loaded is whole as well, and an attempt that is killed soon reports nothing.
    known = [int(line[-1]) for name in ("saved", "begun") for line in lines(run.folder / name)[-1:]]
    pids = start(run)
    begun = [str(run.attempt)]
    wanted, span = draw.randint(-1, 4), 0.3
    if wanted >= 0:  # the others are killed while they start and load
        sleep_until(lambda: begun in [line[:1] for line in lines(run.folder / "begun")], pids)
        since = time.monotonic()
        sleep_until(lambda: [line[:1] for line in lines(run.folder / "losses")].count(begun) >= wanted, pids)
        span = max(0.05, 1.5 * (time.monotonic() - since) / max(1, wanted))  # about what one step takes
    time.sleep(draw.random() * span)
    which, before = draw.choice(("all", "0", "1")), ended(pids)
    kill(pids, pids if which == "all" else [pids[int(which)]], draw.random() * 0.1)
    codes = wait(pids)
    return {
        "which": which,
        "stage": run.stage,
        "background": run.background,
        "tag": run.tag,
        "known": max(known, default=0),
        "began": next((int(line[1]) for line in lines(run.folder / "begun") if line[:1] == begun), None),
        "losses": [line[1:] for line in lines(run.folder / "losses") if line[:1] == begun],
        "before": before,
        "codes": codes,
        "torn": torn(run.folder / "checkpoints"),
        "said": (run.folder / f"said-{run.attempt}").read_text(),
    }


def tell(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    folder, kills, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    alone = folder / "uninterrupted"
    alone.mkdir()
    wait(start(Run(alone, int(sys.argv[4]), 0, save=False)))
    tell([line[1:] for line in lines(alone / "losses")])
    done, torn_ones, runs = 0, 0, 0

    def enough() -> bool:
        # Where a kill comes is chance: where none of them came in the middle of a save, some more are tried.
        return done >= kills and (torn_ones > 0 or done >= 5 * kills)

    while not enough():
        runs += 1
        here = folder / f"run-{runs}"
        here.mkdir()
        tag = "always" if runs % 2 == 0 else None  # saved over and over; or each step under a name of its own
        number = 0
        while not enough():
            stage, background = draw.randrange(4), draw.random() < 0.5
            result = attempt(Run(here, STEPS, stage, tag, background=background, attempt=number), draw)
            tell(result)
            number += 1
            done += 1
            torn_ones += result["torn"]
            if result["codes"] == [0] * WORLD:
                break
        shutil.rmtree(here)


if __name__ == "__main__":
    main()
