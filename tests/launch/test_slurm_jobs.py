"""The promise: batch jobs of a real Slurm go on where they ended, and end with the bits of a run that never ended.

The unbroken run is one process without a launcher; its steps have the bits of two ranks ("reduce": "tree").
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nodes import environment, eventually
from pages import ROOT, files
from slurm import OVER, RANK, Slurm, lines

pytestmark = pytest.mark.long

STEPS = 60
SAVES = "-N 2 --ntasks-per-node=1 --requeue --open-mode=append"
SRUN = f"srun --kill-on-bad-exit=1 {sys.executable}"
OURS = f"{sys.executable} -m zero run --launcher slurm --num_gpus 1"
REQUEUE = 'status=$?; [ $status -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"; exit $status'
STARTS = pytest.mark.parametrize("start", [SRUN, OURS], ids=["srun", "zero run"])


def train(folder: Path, steps: int, every: int = 0) -> list[list[str]]:
    """One process, from the newest checkpoint in `folder` on; the hash of its weights."""
    words = [sys.executable, RANK, str(folder), str(steps), "0", "", str(every)]
    subprocess.run(words, env=environment(OMP_NUM_THREADS="1"), capture_output=True, check=True)
    return lines(folder / "hash")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the unbroken run."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, STEPS)
    return folder


def script(*commands: str) -> str:
    return "\n".join(["#!/bin/bash", *commands, ""])


def said(folder: Path) -> str:
    """What the jobs of a folder have written."""
    return "\n".join(path.read_text() for path in folder.glob("slurm-*.out"))


def trained(slurm: Slurm, job: str, folder: Path, state: str = "COMPLETED") -> dict[str, str]:
    """The end of a job that ends so."""
    end = slurm.ended(job)
    assert end["JobState"] == state, (end, said(folder))
    return end


def until(ready: Callable[[], bool], slurm: Slurm, job: str, folder: Path) -> None:
    """Return once it is so, of a job that has not ended before, nor hangs."""
    for _ in range(60):
        if eventually(ready, 5):
            return
        assert slurm.job(job)["JobState"] not in OVER, (slurm.job(job), said(folder), slurm.logs())
    raise TimeoutError(f"{slurm.job(job)}\n{said(folder)}\n{slurm.logs()}")


def reached(slurm: Slurm, job: str, folder: Path, step: int) -> None:
    """Return once a step is through."""
    until(lambda: len(lines(folder / "losses")) >= step, slurm, job, folder)


def each_step_once(folder: Path, whole: Path) -> None:
    """No step was lost or came twice, all losses are those of the unbroken run, and so are the weights.

    The loss of a step behind which a signal has ended the run is written nowhere.
    """
    wanted, found = lines(whole / "losses"), lines(folder / "losses")
    ended = [int(step) for step, rank, *_ in lines(folder / "begun") if rank == "0" and step != "0"]
    assert sorted([*ended, *(int(step) for step, _ in found)]) == list(range(1, len(wanted) + 1)), said(folder)
    assert [each for each in found if each not in wanted] == []
    assert lines(folder / "hash") == lines(whole / "hash")


def test_an_array_and_steps_side_by_side_over_both_nodes(slurm: Slurm, whole: Path, tmp_path: Path) -> None:
    for name in "0123":
        (tmp_path / name).mkdir()
    step = f"srun -N 2 -n 2 --exact {sys.executable} {RANK} {{}} {STEPS}"
    array = slurm.submit(tmp_path, script(step.format("$SLURM_ARRAY_TASK_ID")), "-N", "2", "--array=0-1")
    beside = script(step.format(2) + " &", step.format(3) + " &", "wait")
    trained(slurm, slurm.submit(tmp_path, beside, "-N", "2", "-n", "4", "--ntasks-per-node=2"), tmp_path)
    for task in "01":
        trained(slurm, f"{array}_{task}", tmp_path)
    for name in "0123":
        each_step_once(tmp_path / name, whole)


def test_a_heterogeneous_job(slurm: Slurm, whole: Path, tmp_path: Path) -> None:
    rank = [sys.executable, RANK, str(tmp_path), str(STEPS)]
    done = slurm.run("srun", "-N1", "-n1", *rank, ":", "-N1", "-n1", *rank)
    assert done.returncode == 0, done.stderr
    assert {node for *_, node in lines(tmp_path / "begun")} == {"node1", "node2"}
    each_step_once(tmp_path, whole)


@STARTS
def test_a_requeue_in_the_middle(slurm: Slurm, whole: Path, tmp_path: Path, start: str) -> None:
    job = slurm.submit(tmp_path, script(f"{start} {RANK} . {STEPS} 0.05 '' 4"), *SAVES.split())
    reached(slurm, job, tmp_path, 10)
    assert slurm.run("scontrol", "requeue", job).returncode == 0
    assert trained(slurm, job, tmp_path)["Restarts"] == "1"
    from_there = int(lines(tmp_path / "begun")[-1][0])
    assert from_there >= 8 and from_there % 4 == 0
    assert lines(tmp_path / "hash") == lines(whole / "hash")


def test_a_restart_by_the_launcher(slurm: Slurm, whole: Path, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path, script(f"{OURS} --max_restarts 1 {RANK} . {STEPS} 0.05 '' 4"), *SAVES.split())
    reached(slurm, job, tmp_path, 10)
    pid = next(pid for _, rank, pid, _ in lines(tmp_path / "begun") if rank == "1")
    assert slurm.run("kill", "-KILL", pid).returncode == 0
    assert trained(slurm, job, tmp_path)["Restarts"] == "0"
    assert "rank 1 on host node2 was killed by SIGKILL" in said(tmp_path) and "restart 1 of 1" in said(tmp_path)
    assert int(lines(tmp_path / "begun")[-1][0]) >= 8
    assert lines(tmp_path / "hash") == lines(whole / "hash")


@pytest.mark.parametrize(
    ("start", "words"), [(SRUN, "scancel"), (OURS, "scancel"), (OURS, "scancel --batch --signal=TERM")],
    ids=["srun", "zero run", "zero run, which alone gets it"],
)  # fmt: skip
def test_ranks_get_sigterm_as_it_is_and_save(slurm: Slurm, whole: Path, tmp_path: Path, start: str, words: str) -> None:
    text = script(f"exec {start} {RANK} . {STEPS} 0.05 SIGTERM")
    job = slurm.submit(tmp_path, text, *SAVES.split())
    reached(slurm, job, tmp_path, 10)
    assert slurm.run(*words.split(), job).returncode == 0
    trained(slurm, job, tmp_path, "CANCELLED" if words == "scancel" else "FAILED")
    assert "a signal has come: saving" in said(tmp_path) and "KeyboardInterrupt" not in said(tmp_path)
    trained(slurm, slurm.submit(tmp_path, text, *SAVES.split()), tmp_path)
    each_step_once(tmp_path, whole)


def wrapper(folder: Path, steps: int, seconds: float) -> None:
    """The `train.py` that the script of the page starts."""
    given = f"Path(__file__).parent, {steps}, {seconds}, 'SIGUSR1'"
    (folder / "train.py").write_text(f"from pathlib import Path\nfrom slurm_rank import main\nmain({given})\n")


def of_the_page(slurm: Slurm, folder: Path, *options: str) -> str:
    """Submit the batch script of docs/slurm.md as it stands there."""
    text = files(ROOT / "docs" / "slurm.md")["job.sh"]
    assert len(text.splitlines()) <= 15
    return slurm.submit(folder, text, "--ntasks-per-node=1", *options)


def test_time_limits_of_slurm_itself(slurm: Slurm, tmp_path: Path) -> None:
    """Two jobs with one minute: the script of the page, and one whose batch script alone gets the signal.

    Slurm looks at limits twice in a minute, and signals up to half a minute early: 20 to 50 s behind the start.
    """
    steps = 200  # which take more than 50 s
    hand_on = ["trap 'kill -USR1 $!' USR1", "wait $!", "wait $!", REQUEUE]
    page, ours = tmp_path / "page", tmp_path / "ours"
    for folder in (page, ours):
        folder.mkdir()
    wrapper(page, steps, 0.25)
    jobs = [of_the_page(slurm, page, "--time=1", "--signal=USR1@10")]
    text = script(f"{OURS} {RANK} . {steps} 0.25 SIGUSR1 &", *hand_on)
    options = ["--nodes=1", "--time=1", "--signal=B:USR1@10", "--requeue", "--open-mode=append"]
    jobs.append(slurm.submit(ours, text, *options))
    for job, folder in zip(jobs, (page, ours), strict=True):
        assert int(trained(slurm, job, folder)["Restarts"]) >= 1
        assert "DUE TO TIME LIMIT" not in said(folder)
    assert "rank 0 ended with exit code 75, to go on later" in said(ours)
    train(tmp_path, steps)
    for folder in (page, ours):
        each_step_once(folder, tmp_path)


def limited(slurm: Slurm, job: str, folder: Path, limits: int, draw: random.Random) -> None:
    """Interrupt a job so often, behind up to ten steps and a part of one."""
    for number in range(1, limits + 1):
        until(lambda number=number: len(lines(folder / "begun")) == 2 * number, slurm, job, folder)
        reached(slurm, job, folder, len(lines(folder / "losses")) + draw.randrange(10))
        time.sleep(0.05 * draw.random())
        assert slurm.run("scancel", "--signal=USR1", job).returncode == 0


def test_twenty_time_limits_at_random_moments(slurm: Slurm, tmp_path: Path) -> None:
    """Two jobs side by side, each of which is told ten times of its time limit, and requeues itself.

    The signal is that which Slurm sends before a limit, sent by the same call in its controller, as `scancel --signal`
    asks for it: limits themselves are whole minutes, which it looks at twice in a minute. No step is lost or comes
    twice, so each time there was a whole checkpoint of the last step.
    """
    seed, limits, steps = random.SystemRandom().randrange(10**6), 10, 250
    print(f"seed {seed}")
    page, ours, whole = (tmp_path / name for name in ("page", "ours", "whole"))
    for folder in (page, ours, whole):
        folder.mkdir()
    wrapper(page, steps, 0.02)
    text = script(f"{OURS} {RANK} . {steps} 0.02 SIGUSR1", REQUEUE)
    jobs = {page: of_the_page(slurm, page), ours: slurm.submit(ours, text, *SAVES.split())}
    with ThreadPoolExecutor() as threads:
        for place, (folder, job) in enumerate(jobs.items()):
            jobs[folder] = job, threads.submit(limited, slurm, job, folder, limits, random.Random(seed + place))
    train(whole, steps)
    for folder, (job, interrupted) in jobs.items():
        interrupted.result()
        assert trained(slurm, job, folder)["Restarts"] == str(limits)
        each_step_once(folder, whole)


def test_a_lost_node_and_another_in_its_place(slurm: Slurm, whole: Path, tmp_path: Path) -> None:
    """A node stops to answer; Slurm has it down, and requeues the job, which then has the third one."""
    job = slurm.submit(tmp_path, script(f"{SRUN} {RANK} . {STEPS} 0.25 '' 5"), *SAVES.split())
    step = random.SystemRandom().randrange(6, 15)
    print(f"behind step {step}")
    reached(slurm, job, tmp_path, step)
    slurm.lose("node2")
    try:
        assert trained(slurm, job, tmp_path)["Restarts"] == "1"
    finally:
        slurm.mend("node2")
    first, second = lines(tmp_path / "begun")[:2], lines(tmp_path / "begun")[2:]
    assert [{node for *_, node in each} for each in (first, second)] == [{"node1", "node2"}, {"node1", "node3"}]
    by_hand, step = tmp_path / "by_hand", int(second[0][0])
    assert step >= 5
    by_hand.mkdir()
    train(by_hand, step, every=step)
    train(by_hand, STEPS)
    assert lines(tmp_path / "hash") == [lines(by_hand / "hash")[-1]] == lines(whole / "hash")
