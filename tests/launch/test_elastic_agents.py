"""The promise: under torchrun's agents a run goes on where it was saved, with the ranks that there are then.

Each agent is a host. A rank is killed, the host of rank 0 is lost, another one comes; the run ends with the bits of one
that was started again by hand at the same steps with as many ranks. What torchrun needs for that is said.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from launching import ROOT, Launchers
from nodes import environment, eventually
from ranks import Pool
from torch import nn

import zero
from zero.log import rank_zero

SCRIPT = ROOT / "tests" / "elastic_rank.py"
KILLED, LOST, JOINED, END = 3, 6, 9, 12  # the steps behind which it happens
TOLD = "closing signal SIGTERM"  # what an agent says when it ends its rank
SECONDS = 240  # in which each of them is over, unless something hangs


class Agents:
    """Of one run over up to three hosts, of which each is an agent of torchrun with one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        # Where agents meet; on none of their hosts, so that each of them may be lost.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, wait_for_workers=False)

    def start(self, name: str) -> None:
        words = [
            *[sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=3"],
            *["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._store.port}", "--local-addr=127.0.0.1"],
            *["--rdzv-conf=is_host=0,last_call_timeout=3,keep_alive_interval=1", "--rdzv-id=elastic"],
            *[str(SCRIPT), str(self.folder), *map(str, (END, KILLED, LOST))],
        ]
        with (self.folder / f"said-{name}").open("wb") as said:
            own = environment(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            self.running[name] = subprocess.Popen(words, env=own, stdout=said, stderr=said)

    def lose(self, name: str) -> None:
        """An agent and its rank, at once and without a word."""
        agent = self.running.pop(name)
        for process in [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]:
            process.kill()
        agent.wait()

    def with_rank(self, pid: int) -> str:
        """The name of the agent that has started this process."""
        above = {each.pid for each in psutil.Process(pid).parents()}
        return next(name for name, agent in self.running.items() if agent.pid in above)

    def begun(self, step: int, size: int) -> tuple[int, dict[int, int]]:
        """Where the ranks go on, at that step or after, once there are as many as `size`; the process of each."""

        def found() -> tuple[int, dict[int, int]]:
            lines = [list(map(int, line.split())) for line in text(self.folder / "begun").splitlines()]
            new = [line for line in lines if line[0] >= step and line[1] == size]
            return max((at for at, *_ in new), default=0), {rank: pid for *_, rank, pid in new}

        assert eventually(lambda: len(found()[1]) == size or self.over(), SECONDS), self.said()
        assert len(found()[1]) == size, self.said()
        return found()

    def held(self, step: int) -> None:
        """Wait until the ranks are behind that step, where they wait in turn."""
        assert eventually(lambda: f"\n{step} " in "\n" + text(self.folder / "losses") or self.over(), SECONDS), (
            self.said()
        )

    def go_on(self, step: int) -> None:
        (self.folder / f"hold-{step}").unlink()

    def over(self) -> bool:
        return any(agent.poll() is not None for agent in self.running.values())

    def said(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("said-*"))


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextmanager
def agents(folder: Path) -> Iterator[Agents]:
    folder.mkdir()
    found = Agents(folder)
    try:
        yield found
    finally:
        for name in list(found.running):
            if found.running[name].poll() is None:
                found.lose(name)


def parts(folder: Path) -> dict[str, bytes]:
    """What the ranks wrote for the last step, by the names without that of the save."""
    files = (folder / "checkpoints" / f"global_step{END}").glob("*.safetensors")
    return {path.name.split(".")[0]: path.read_bytes() for path in files}


def restarted_by_hand(launchers: Launchers, folder: Path, *parts: tuple[int, int]) -> Path:
    """The folder of a run that so many ranks train to such a step, and then so many others to the next."""
    by_hand = folder / "by hand"
    by_hand.mkdir()
    for size, end in parts:
        words = ["--num_gpus", str(size), str(SCRIPT), str(by_hand), str(end)]
        done = launchers.run("run", *words, environment=environment(OMP_NUM_THREADS="1"))
        assert done.returncode == 0, done.stdout + done.stderr
    return by_hand


@pytest.mark.long
def test_a_killed_rank_a_lost_host_and_one_that_joins(launchers: Launchers, tmp_path: Path) -> None:
    with agents(tmp_path / "elastic") as run:
        for step in (KILLED, LOST, JOINED):
            (run.folder / f"hold-{step}").touch()
        for name in "abc":
            run.start(name)
        _, ranks = run.begun(0, 3)
        run.held(KILLED)
        os.kill(ranks[1], signal.SIGKILL)
        run.go_on(KILLED)
        behind, ranks = run.begun(KILLED, 3)
        assert behind == KILLED
        run.held(LOST)
        run.lose(run.with_rank(ranks[0]))
        run.go_on(LOST)
        assert run.begun(LOST, 2)[0] == LOST
        run.held(JOINED)
        before = run.said().count(TOLD)
        run.start("d")
        assert eventually(lambda: run.said().count(TOLD) == before + 2, 30), run.said()
        run.go_on(JOINED)
        joined, _ = run.begun(JOINED, 3)
        assert joined in (JOINED + 1, JOINED + 2), "nothing was saved when the ranks were told to end"
        assert [agent.wait(SECONDS) for agent in run.running.values()] == [0, 0, 0], run.said()

    by_hand = restarted_by_hand(launchers, tmp_path, (3, KILLED), (3, LOST), (2, joined), (3, END))
    # Of the step in which the ranks ended nobody was left to note the loss.
    lines = [line for line in text(by_hand / "losses").splitlines() if not line.startswith(f"{joined} ")]
    assert text(run.folder / "losses").splitlines() == lines and len(lines) == END - 1
    assert len(parts(by_hand)) == 9
    assert parts(run.folder) == parts(by_hand)


@pytest.mark.long
def test_ranks_of_one_agent_meet_again_as_often_as_they_are_killed(launchers: Launchers, tmp_path: Path) -> None:
    """Without any variable, and in the store of the agent, where those before have left their addresses."""
    kills = [3, 5, 7, 9]
    with agents(tmp_path / "one") as run:
        for step in kills:
            (run.folder / f"hold-{step}").touch()
        words = ["--standalone", "--nproc-per-node=2", f"--max-restarts={len(kills)}", str(SCRIPT), str(run.folder)]
        with (run.folder / "said-a").open("wb") as said:
            run.running["a"] = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words, *map(str, (END, *kills))],
                env=environment(OMP_NUM_THREADS="1"),
                stdout=said,
                stderr=said,
            )
        for before, step in zip([0, *kills], kills, strict=False):
            _, ranks = run.begun(before, 2)
            run.held(step)
            os.kill(ranks[step % 4 // 2], signal.SIGKILL)
            run.go_on(step)
        assert run.running["a"].wait(SECONDS) == 0, run.said()
    by_hand = restarted_by_hand(launchers, tmp_path, *((2, step) for step in [*kills, END]))
    assert len(parts(by_hand)) == 6
    assert parts(run.folder) == parts(by_hand)


def saved(folder: str) -> bool:
    """On a rank whose agent has counted other restarts than the others, since it came later."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(dist.get_rank())
    try:
        config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "zero": {"timeout": 20}}
        engine, *_ = zero.initialize(model=nn.Linear(2, 2), config=config)
        return engine.save_checkpoint(folder)
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_agents_need_not_have_counted_the_same_restarts(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, saved, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(
    ("own", "restarts", "hosts", "warned"),
    [("True", "3", "2", True), ("True", "0", "2", False), ("False", "3", "2", False), ("True", "3", "1", False)],
)
def test_a_store_that_outlives_the_ranks_is_warned_of(
    own: str, restarts: str, hosts: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zero.engine.joining.log_once", rank_zero)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", own)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
    with caplog.at_level(logging.WARNING, "zero"):
        zero.init_distributed()
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) == warned
