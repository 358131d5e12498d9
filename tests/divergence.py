"""Ranks that part company: a program of test_divergence.py, with real processes that can be killed and stopped.

Every case runs three ranks of a small Net; at some step one of them does what the case says. All processes are forked
from this one, which has imported torch for them, each case when the trouble of the one before begins: they wait side by
side, but do not start so. Each writes what it says to FOLDER/case-rank.txt, touches FOLDER/case-rank.came
when it comes to that step, and this process writes the exit codes to FOLDER/codes.json.

    python tests/divergence.py FOLDER
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import Net, batch, config
from ports import free_port
from torch import nn

import zero
from zero.watchdog import hang_detector

WORLD = 3
TIMEOUT = 14.0  # of the waits, in the JSON; a busy machine comes to know within that who is silent
SLOW = 16.0  # how long the slow rank computes, in a case that has more time; on a busy machine words take seconds
SECONDS = 120  # after which everything is killed; shortly before, each process says where it is


class Case(NamedTuple):
    """What happens at stage 3, on which rank, from which step on."""

    what: str
    rank: int = 2
    step: int = 3


CASES = {  # those that take longest begin first
    "slow": Case("slow"),
    "stop": Case("stop"),
    "stop_keeper": Case("stop", rank=0),
    "skip": Case("skip", step=0),
    "build": Case("build"),
    "kill": Case("kill"),
    "kill_keeper": Case("kill", rank=0),  # the one whose process keeps the store
    "raise": Case("raise"),
    "raise_keeper": Case("raise", rank=0),
    "leave": Case("leave"),
    "alone": Case("alone"),
}


class Trouble(nn.Module):
    """A module without parameters that does what it is told."""

    what = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.what == "slow":
            self.what = ""
            time.sleep(SLOW)
        if self.what in ("raise", "alone"):
            self.what = ""
            raise ValueError("bad sample 17")
        return x


class TroubledNet(Net):
    """A Net with trouble in its middle block, or without that block."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__()
        self.blocks[1].norm = nn.Sequential(Trouble(), self.blocks[1].norm)
        self.skip = False

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = x if self.skip and index == 1 else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def run(case: Case, rank: int, came: Path) -> None:
    """One rank, which touches `came` when it comes to the step of the trouble."""
    faulthandler.dump_traceback_later(SECONDS - 20)
    settings = config(3, WORLD, zero={"timeout": 5 * SLOW if case.what == "slow" else TIMEOUT})
    if case.what == "build":
        block = zero.Init(config_dict_or_path=settings)
        if rank == case.rank:
            came.touch()
            time.sleep(SECONDS)  # it is elsewhere, and its process lives
        with block:
            pass
    model = TroubledNet()
    engine, *_ = zero.initialize(model=model, config=settings)
    trouble = model.blocks[1].norm[0]
    for step in range(6 if case.what == "slow" else 100):
        if step == case.step:
            came.touch()
        if rank == case.rank and step == case.step:
            trouble.what = case.what
            if case.what == "leave":
                raise KeyError("the data set has no such sample")
        model.skip = rank == case.rank and case.what == "skip"
        tokens, targets = batch(step, 2 * WORLD)
        try:
            engine.backward(engine(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]))
        except ValueError:
            if case.what != "alone":
                raise
            continue
        engine.step()
    engine.destroy()


def fork(name: str, rank: int, port: int, said: Path) -> int:
    """Start a rank; returns its process id."""
    case = CASES[name]
    pid = os.fork()
    if pid:
        return pid
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(LOCAL_RANK=str(rank))
    if case.what in ("leave", "slow") or name == "raise_keeper":
        run(case, rank, said.with_suffix(".came"))
        sys.exit(0)
    code = 0
    try:
        run(case, rank, said.with_suffix(".came"))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    atexit._run_exitfuncs()  # as at the end of any program
    os._exit(code)  # the rest takes a torch interpreter a second of computing


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    zero.initialize  # noqa: B018 -- imports, here for all ranks, what each would import for itself
    hang_detector.AGAIN = 2.0  # what a rank learns late, on a busy machine, stands in a later line
    gc.freeze()  # pages that no rank writes to need no copy
    running: dict[int, tuple[str, int]] = {}
    for name in CASES:
        port = free_port()
        for rank in range(WORLD):
            running[fork(name, rank, port, folder / f"{name}-{rank}.txt")] = (name, rank)
        late = time.monotonic() + SECONDS / 2
        while not (folder / f"{name}-{CASES[name].rank}.came").exists() and time.monotonic() < late:
            time.sleep(0.01)
    codes: dict[str, Any] = {}
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and any(
        CASES[name].rank != rank or CASES[name].what not in ("stop", "build") for name, rank in running.values()
    ):
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                name, rank = running.pop(pid)
                codes[f"{name}-{rank}"] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
