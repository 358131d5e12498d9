"""The promise: a drive that fails is an error with unit, file and rank; a process that dies leaves nothing behind.

The faults are real ones of the system: a descriptor that stands for a full drive, a file cut short, a kill.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models import Net, batch, config, make_net, step, train
from ranks import Pool

import zero

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full and /proc")
KINDS = {"optimizer": ("offload_optimizer", {}), "param": ("offload_param", {"max_in_cpu": 0})}


def settings_of(folder: str, kind: str, world: int, buffers: int = 2) -> dict[str, Any]:
    name, more = KINDS[kind]
    section = {"device": "nvme", "nvme_path": folder, "buffer_count": buffers, **more}
    return config(3, world, zero_optimization={"stage": 3, name: section}, zero={"timeout": 20})


def spoil(how: str, drive: Any) -> None:
    """Make the file of a drive one that cannot be written, cannot be read, or ends too early."""
    with drive.pool.lock:
        for buffer in list(drive.pool.buffers):
            drive.pool.wait(buffer)  # a write on its way would make the file longer again
    fd = drive.file.fd
    if how == "truncated":
        os.ftruncate(fd, 0)
        return
    other = os.open(*{"full": ("/dev/full", os.O_RDWR), "unreadable": (os.devnull, os.O_WRONLY)}[how])
    os.dup2(other, fd)
    os.close(other)


def failed(folder: str, kind: str, how: str, world: int, rank_at_fault: int) -> dict[str, Any]:
    import torch.distributed as dist

    net = make_net(blocks=6)
    engine, *_ = zero.initialize(model=net, config=settings_of(folder, kind, world))
    step(engine, 0)
    engine.optimizer.settle()
    if dist.get_rank() == rank_at_fault:
        spoil(how, engine._sharded.offload.swap_files[kind])
    found: dict[str, Any] = {"said": []}
    for number in range(1, 5):
        try:
            step(engine, number)
        except RuntimeError as error:
            found["said"].append(str(error))
    try:
        engine.destroy()
        found["destroyed"] = "yes"
    except RuntimeError as error:
        found["destroyed"] = str(error)
    found["plain"] = type(next(net.parameters())).__name__
    return found


FAULTS = [
    ("optimizer", "full", "write of", "No space left on device"),
    ("optimizer", "truncated", " of", "the file "),
    ("optimizer", "unreadable", "read of", "Bad file descriptor"),
    ("param", "full", "write of", "No space left on device"),
    ("param", "truncated", " of", "the file "),
]


@LINUX
@pytest.mark.parametrize(("kind", "how", "what", "why"), FAULTS)
def test_a_fault_names_unit_rank_and_file(pool: Pool, tmp_path: Path, kind: str, how: str, what: str, why: str) -> None:
    found = pool.run(1, failed, str(tmp_path), kind, how, 1, 0)[0]
    first, last = found["said"][0], found["said"][-1]
    for part in ("unit '", "rank 0", f"{what} bytes", f"{tmp_path}/zero-{kind}-of-rank-0", why, "checkpoint"):
        assert part in first
        assert part in last  # what is lost stays lost: no later step pretends otherwise
    if kind == "optimizer":
        assert (found["destroyed"], found["plain"]) == ("yes", "Parameter")
    else:
        assert why in found["destroyed"]  # the parameters themselves are lost


@LINUX
def test_the_other_ranks_are_told(pool: Pool, tmp_path: Path) -> None:
    first, other = pool.run(2, failed, str(tmp_path), "optimizer", "full", 2, 1)
    assert "rank 1" in first["said"][0]
    assert "No space left on device" in first["said"][0]
    assert "zero-optimizer-of-rank-1" in other["said"][0]


@LINUX
def test_a_folder_that_vanishes_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    plain, ours = (pool.run(1, without_folder, str(tmp_path), device)[0] for device in ("none", "nvme"))
    assert plain == ours


def without_folder(folder: str, device: str) -> list[float]:
    folder = str(Path(folder) / "gone")
    settings = settings_of(folder, "optimizer", 1)
    settings["zero_optimization"]["offload_optimizer"]["device"] = device
    engine, *_ = zero.initialize(model=make_net(), config=settings)
    losses = []
    for number in range(4):
        loss = engine(*batch(number, 2))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        shutil.rmtree(folder, ignore_errors=True)
    engine.destroy()
    return losses


@pytest.mark.ranks(2)
@LINUX
def test_too_little_room_on_one_rank_is_said_on_all_at_the_start(tmp_path: Path) -> None:
    """Initialize where one rank may make no file larger than 1 MiB; then everywhere, which works."""
    import torch.distributed as dist

    settings = settings_of(str(tmp_path), "optimizer", 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    gc.collect()  # a process group of an earlier test writes to its store when it goes, and aborts if it cannot
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # enough for stores
        zero.initialize(model=Net(width=400), config=settings)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()
    train(make_net(), 2, settings, steps=2)
    assert "offload_optimizer.nvme_path" in said
    assert "a scratch file wants" in said
    assert "(rank 1)" in said
    assert str(tmp_path) in said


def train_for_ever(folder: str) -> None:
    engine, *_ = zero.initialize(model=Net(blocks=4, width=200), config=settings_of(folder, "optimizer", 1))
    engine._sharded.offload.swap_files["optimizer"].pool.on_request = lambda what, unit: sys.stdout.write(f"{what}\n")
    for number in range(10**6):
        step(engine, number)
        sys.stdout.flush()


@LINUX
def test_a_killed_process_leaves_nothing_and_the_next_one_works(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "drive"
    here = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), str(here), str(here / "offload")])}
    code = f"from test_nvme_faults import train_for_ever; train_for_ever({str(folder)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        written = 0
        while written < 20:
            line = process.stdout.readline()
            assert line, "it ended by itself"
            written += line == "write\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    assert list(folder.iterdir()) == []
    plain, ours = (pool.run(1, without_folder, str(tmp_path), device)[0] for device in ("none", "nvme"))
    assert plain == ours
