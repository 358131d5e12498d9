"""The promise: a script runs as it is under every launcher, with the same losses to the last digit.

`zero run`, torchrun, mpirun of Open MPI and of MPICH, srun, and processes that have what srun would set. Two jobs side
by side do not meet, and an exception on one rank ends the job.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from launching import Launched, Launchers
from nodes import LAUNCHERS, alive, eventually
from ports import free_port
from starting import WHO
from torch import nn

import zero
from zero.engine.joining import met

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "starting.py")
ROOT_TOO = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SECONDS = timedelta(seconds=300)  # that nothing takes here, unless it hangs


Process = subprocess.Popen[str] | Launched


class Line(NamedTuple):
    """What a rank printed."""

    who: str
    losses: str
    port: str
    total: str


def environment(**extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not LAUNCHERS.match(key)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **ROOT_TOO, **extra}


def begin(words: list[str], **extra: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words, env=environment(**extra), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def ended(*processes: Process, good: bool = True) -> tuple[str, str]:
    """What they wrote to stdout and to stderr, when all have ended, well or not."""
    out, said = "", ""
    try:
        for process in processes:
            found = process.communicate(timeout=SECONDS.seconds)
            out, said = out + found[0], said + found[1]
            assert (process.returncode == 0) == good, said
    finally:
        for process in processes:
            process.kill()
    return out, said


def lines(*processes: Process) -> list[Line]:
    """What all ranks printed, in order of ranks."""
    return sorted(Line(*line.split("|")) for line in ended(*processes)[0].splitlines())


def no_cluster(tasks: list[str]) -> str:
    """Why Slurm starts no such tasks here: it is not installed, none answers, or none is free; "" where it does."""
    try:
        done = subprocess.run([*tasks, "true"], env=environment(), capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"srun ended with {done.returncode}: {done.stderr.strip()}" if done.returncode else ""


@functools.cache
def mpirun(kind: str) -> list[str]:
    """The command of Open MPI or MPICH for two ranks; skips where it is not there."""
    names = {"Open MPI": ["mpirun.openmpi", "mpirun"], "HYDRA": ["mpiexec.hydra", "mpirun.mpich", "mpirun"]}[kind]
    for path in filter(None, map(shutil.which, names)):
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
        if kind in said:
            return [path, *(["--oversubscribe"] if kind == "Open MPI" else []), "-n", "2", sys.executable]
    pytest.skip(f"there is no mpirun of {kind.replace('HYDRA', 'MPICH')} here")


@pytest.fixture(scope="module")
def wanted(launchers: Launchers) -> list[str]:
    """The losses that both ranks print under `zero run`."""
    with launchers.start("run", "--num_gpus", "2", SCRIPT, "train", environment=environment()) as process:
        found = lines(process)
    assert [line.who for line in found] == ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1"]
    assert found[0].losses != found[1].losses, "each rank has data of its own"
    return [line.losses for line in found]


def check(found: list[Line], wanted: list[str], total: str = "None") -> None:
    assert [line.who for line in found] == ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1"]
    assert [line.losses for line in found] == wanted
    assert len({line.port for line in found}) == 1
    assert {line.total for line in found} == {total}


@pytest.mark.long
def test_torchrun(wanted: list[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    found = lines(begin([*torchrun, SCRIPT, "train"]))
    # It calls this machine by its name.
    check([line._replace(who=re.sub(r"\S+$", "127.0.0.1", line.who)) for line in found], wanted)


def test_mpirun_of_open_mpi(wanted: list[str]) -> None:
    check(lines(begin([*mpirun("Open MPI"), SCRIPT, "again"])), wanted, total="33333")


@pytest.mark.long
def test_two_jobs_of_mpich_side_by_side(wanted: list[str]) -> None:
    command = [*mpirun("HYDRA"), SCRIPT]
    found = lines(begin([*command, "again"]), begin([*command, "meet"]))
    first, second = ([line for line in found if (line.losses == "None") == meets] for meets in (False, True))
    check(first, wanted, total="33333")
    check(second, ["None", "None"], total="33333")
    assert first[0].port != second[0].port


def slurm(rank: int, job: int, step: str = "0") -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1",
    }  # fmt: skip


@pytest.mark.long
def test_processes_that_have_what_srun_sets(wanted: list[str]) -> None:
    job = os.getpid()  # no other run of this test has it
    found = lines(*[begin([sys.executable, SCRIPT, "again"], **slurm(rank, job)) for rank in (1, 0)])
    check(found, wanted, total="33333")


@pytest.mark.long
def test_pods_of_a_pytorchjob(wanted: list[str]) -> None:
    """With the variables of its operator, of which none says which rank of its host a process is."""
    pods = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "PET_NNODES": "2"}
    found = lines(*[begin([sys.executable, SCRIPT, "train"], RANK=str(rank), **pods) for rank in (1, 0)])
    assert [line.who for line in found] == ["0 None 2 None localhost", "1 None 2 None localhost"]
    assert [line.losses for line in found] == wanted


def test_srun(wanted: list[str]) -> None:
    tasks = ["srun", "--immediate=20", "--nodes=1", "-n", "2"]
    if why := no_cluster(tasks):
        pytest.skip(f"there is no cluster of Slurm here: {why}")
    check(lines(begin([*tasks, sys.executable, SCRIPT, "again"])), wanted, total="33333")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Open MPI", "HYDRA"])
def test_an_exception_on_one_rank_ends_the_job(tmp_path: Path, kind: str) -> None:
    _, said = ended(begin([*mpirun(kind), SCRIPT, "fail", str(tmp_path)]), good=False)
    assert "ValueError: of rank 1" in said
    for rank in (0, 1):
        pid = int((tmp_path / f"{rank}.pid").read_text())
        assert eventually(lambda pid=pid: not alive(pid))


def environment_after(given: dict[str, str], **arguments: object) -> dict[str, str | None] | str:
    """What this rank of a group that exists, or none, reads afterwards; or the error."""
    before = {name: os.environ.pop(name, None) for name in WHO}
    os.environ.update(given)
    try:
        zero.init_distributed(**arguments)
        return {name: os.environ.get(name) for name in WHO}
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        for name in (*given, *WHO):
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def adopted() -> tuple[dict[str, str | None] | str, ...]:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    return environment_after(slurm(rank, 1)), environment_after(slurm(other, 1)), environment_after({"PMI_RANK": "x"})


def test_a_group_that_the_script_has_made_is_adopted_and_the_ranks_of_the_host_are_known(pool) -> None:
    for rank, (same, another, broken) in enumerate(pool.run(2, adopted)):
        assert same == dict(zip(WHO, [str(rank), str(rank), "2", "2", "127.0.0.1"], strict=True))
        assert another == broken == dict.fromkeys(WHO)


def test_a_group_that_should_be_there_is_missed() -> None:
    assert "call torch.distributed.init_process_group first" in environment_after({}, dist_init_required=False)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_without_a_gpu_is_an_error_that_says_what_to_take(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = environment_after(TORCHRUN, dist_backend=backend)
    assert f"{backend!r}): NCCL wants a GPU for each rank, and torch sees none here; leave the argument out" in said


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize("given", [{"WORLD_SIZE": "2"}, slurm(1, 1), TORCHRUN], ids=["half set", "srun", "torchrun"])
def test_a_rank_that_should_have_a_group_does_not_train_alone(given: dict[str, str], monkeypatch) -> None:
    for name in WHO:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    alone = {"model": nn.Linear(2, 2), "config": {"train_micro_batch_size_per_gpu": 1}, "dist_init_required": False}
    with pytest.raises((RuntimeError, ValueError), match=r"rank 1 of 2 .*init_process_group first|lacks \['RANK'"):
        zero.initialize(**alone)
    for name in given:
        monkeypatch.delenv(name)
    assert zero.initialize(**alone)[0].world_size == 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks meet in these tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"zero-{os.getuid()}"


def meet_once(rank: int, timeout: timedelta, job: str = "job") -> int:
    with met(job, 0, rank, 2, timeout) as port:
        return port


def meet(job: str) -> tuple[int, int]:
    """The port of rank 0 as it knows it, and as a rank 1 reads it that came first."""
    read: list[int] = []

    thread = threading.Thread(target=lambda: read.append(meet_once(1, SECONDS, job)))
    thread.start()
    time.sleep(0.1)  # it looks into the folder
    with met(job, 0, 0, 2, SECONDS) as port:
        thread.join()
    return port, *read


def test_the_port_of_a_job_that_was_killed_is_not_believed(folder: Path) -> None:
    if not (pid := os.fork()):
        with met("job", 0, 0, 2, SECONDS):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(list(folder.iterdir())) == 1
    port, read = meet("job")
    assert port == read
    assert not list(folder.iterdir()), "nothing is left behind"


def test_who_waits_in_vain_says_so(folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1: rank 0 has not said within 0.1 s .* MASTER_PORT"):
        meet_once(1, timedelta(seconds=0.1))
    with pytest.raises(ValueError, match="no process above this one is hydra_pmi_proxy or pmi_proxy"):
        meet_once(1, SECONDS, job="")


def test_a_folder_that_others_can_write_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="has to be a folder that only this user can enter"):
        meet_once(1, SECONDS)
