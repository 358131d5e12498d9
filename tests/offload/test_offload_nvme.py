"""The promise: state in files leaves none behind, and a drive that fails is an error with unit, file and rank.

The faults are real ones of the system: a descriptor that stands for a full drive, a kill.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from models import Net, config, make_net, step
from nodes import environment
from ranks import Pool, said_by
from scenario import run

import zero

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full and /proc")
KINDS = {"optimizer": ("offload_optimizer", {}), "param": ("offload_param", {"max_in_cpu": 0})}


def section_of(folder: Path | str, kind: str = "optimizer", **more: Any) -> dict[str, Any]:
    name, rest = KINDS[kind]
    return {"stage": 3, name: {"device": "nvme", "nvme_path": str(folder), **rest, **more}}


def engine_of(folder: Path | str, kind: str = "optimizer", model: Any = None, **more: Any) -> Any:
    world = dist.get_world_size() if dist.is_initialized() else 1
    settings = config(3, world, zero_optimization=section_of(folder, kind, **more), zero={"timeout": 20})
    return zero.initialize(model=model or make_net(blocks=6), config=settings)[0]


def descriptors(folder: Path | str) -> list[int]:
    """Of the files of a folder that this process has open, with a name or without one."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the list itself
            if os.readlink(f"/proc/self/fd/{number}").startswith(str(folder)):
                found.append(int(number))
    return found


@LINUX
def test_files_have_no_name_and_their_number_stays(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    engine, opened = engine_of(folder), []
    for number in range(8):
        step(engine, number)
        engine.optimizer.settle()
        opened.append(len(descriptors(folder)))
        assert os.listdir(folder) == []
    engine.destroy()
    del engine
    gc.collect()
    assert len(set(opened)) == 1 and opened[0] > 0
    assert descriptors(folder) == []


def failed(folder: str, kind: str, how: str, rank_at_fault: int) -> tuple[list[str], str, str]:
    """What a run says whose drive is full, or cannot be read, from the second step on; at its end; and its parameters.

    Of all steps that are tried, and of `destroy`.
    """
    net = make_net(blocks=6)
    engine = engine_of(folder, kind, net)
    step(engine, 0)
    engine.optimizer.settle()
    if dist.get_rank() == rank_at_fault:
        other = os.open(*{"full": ("/dev/full", os.O_RDWR), "unreadable": (os.devnull, os.O_WRONLY)}[how])
        for descriptor in descriptors(folder):
            os.dup2(other, descriptor)
        os.close(other)
    said = [said_by(lambda number=number: step(engine, number)) for number in range(1, 5)]
    ended = said_by(engine.destroy)
    return [text for text in said if text != "nothing"], ended, type(next(net.parameters())).__name__


@LINUX
@pytest.mark.parametrize(
    ("world", "kind", "how", "what", "why"),
    [
        (2, "optimizer", "full", "write of", "No space left on device"),
        (1, "optimizer", "unreadable", "read of", "Bad file descriptor"),
        (1, "param", "full", "write of", "No space left on device"),
    ],
)
def test_a_fault_names_unit_rank_and_file(
    pool: Pool, tmp_path: Path, world: int, kind: str, how: str, what: str, why: str
) -> None:
    """Of the last rank, to all of them."""
    last, ranks = world - 1, pool.run(world, failed, str(tmp_path), kind, how, world - 1)
    firsts = [said[0] for said, _, _ in ranks]
    assert all(f"rank {last}" in first and why in first for first in firsts), "\n".join(firsts)
    said, ended, plain = ranks[last]
    for part in ("unit '", f"{what} bytes", f"{tmp_path}/zero-{kind}-of-rank-{last}", why, "checkpoint"):
        assert part in said[0]
        assert part in said[-1]  # what is lost stays lost: no later step pretends otherwise
    if kind == "optimizer":
        assert (ended, plain) == ("nothing", "Parameter")
    else:
        assert why in ended  # the parameters themselves are lost


@LINUX
@pytest.mark.ranks(2)
def test_too_little_room_on_one_rank_is_said_on_all_at_the_start(tmp_path: Path) -> None:
    """Initialize where one rank may make no file larger than 1 MiB; then everywhere, which works."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    gc.collect()  # a process group of an earlier test writes to its store when it goes, and aborts if it cannot
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # enough for stores
        said = said_by(lambda: engine_of(tmp_path, model=Net(width=400)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()
    run("net", {"stage": 3, "section": section_of(tmp_path)}, 2)
    for part in "offload_optimizer.nvme_path", "a scratch file wants", "(rank 1)", str(tmp_path):
        assert part in said


PROGRAM = """
import sys
from models import Net, step
sys.path.append(sys.argv[2])
from test_offload_nvme import engine_of

engine = engine_of(sys.argv[1], model=Net(blocks=4, width=200))
for number in range(10**6):
    step(engine, number)
    sys.stdout.write("stepped\\n")
    sys.stdout.flush()
"""


@LINUX
def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            for _ in range(5):
                assert process.stdout.readline() == "stepped\n", "it ended by itself"
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def refused(folder: str, kind: str, params: dict[str, Any], group: dict[str, Any]) -> str:
    """Momentum may begin after the first step."""
    settings = config(1, 1, optimizer={"type": kind, "params": params})
    settings["zero_optimization"] = {**section_of(folder), "stage": 1}
    net = make_net()
    groups = [{"params": list(net.parameters()), **group}]
    try:
        engine, *_ = zero.initialize(model=net, model_parameters=groups, config=settings)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    return f"later: {said_by(lambda: [(step(engine, number), engine.optimizer.settle()) for number in range(2)])}"


def test_state_that_no_file_foresaw_is_refused(tmp_path: Path) -> None:
    for kind, more in (("RMSprop", {}), ("AdamW", {"torch_adam": True})):
        said = refused(str(tmp_path), kind, {"lr": 1e-3, **more}, {})
        assert "zero_optimization.offload_optimizer.device: got 'nvme' with an optimizer class of torch" in said
    said = refused(str(tmp_path), "SGD", {"lr": 1e-3}, {})
    assert said.startswith("later: ") and "0 were reserved" in said and "SGD's momentum" in said
    said = refused(str(tmp_path), "SGD", {"lr": 1e-3}, {"momentum": 0.5})
    assert said.startswith("RuntimeError: ") and "0 were reserved" in said
    assert refused(str(tmp_path), "SGD", {"lr": 1e-3, "momentum": 0.1}, {}) == "later: nothing"


def test_reads_begin_before_the_update_before_is_over(tmp_path: Path) -> None:
    engine, seen = engine_of(tmp_path, buffer_count=4), []
    step(engine, 0)
    engine.optimizer.settle()
    drive = engine._sharded.offload.swap_files["optimizer"].pool

    def updated(what: str, unit: str) -> None:
        seen.append((what, unit))
        if what == "done":
            # A slow drive would leave no buffer to read ahead into, and the order would be its, not ours.
            with drive.lock:
                for buffer in list(drive.buffers):
                    drive.wait(buffer)

    engine.optimizer._updater.on_update = updated
    drive.on_request = lambda what, unit: seen.append((what, unit))
    step(engine, 1)
    engine.optimizer.settle()
    engine.destroy()
    units = [unit for what, unit in seen if what == "update"]
    assert len(units) > 6
    for before, unit in pairwise(units):
        # What is not read here was read ahead at the end of the step before.
        reads = [place for place, event in enumerate(seen) if event == ("read", unit)]
        assert all(at < seen.index(("done", before)) or at > seen.index(("done", unit)) for at in reads)
        # The next update begins while this one's result is on its way to the drive.
        assert seen.index(("write", before)) < seen.index(("update", unit))
    assert sum(what == "read" for what, _ in seen) >= len(units) - 4
