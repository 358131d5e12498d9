"""The promise: an asynchronous save holds the step it was called at, is waited for, and never fails in silence."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_files import engine_of, index_of, same, step, tensors
from launching import Launchers
from marks import longer
from nodes import environment
from ranks import Pool

BESIDE = {"zero": {"checkpoint": {"async": True}}}


@contextlib.contextmanager
def held_back() -> Iterator[threading.Event]:
    """No file is synced before the event is set; it is set at the end."""
    real, gate = os.fsync, threading.Event()

    def wait(file: int) -> None:
        gate.wait()
        real(file)

    os.fsync = wait
    try:
        yield gate
    finally:
        gate.set()
        os.fsync = real


def train(stage: int, folder: str, more: dict[str, Any]) -> tuple[list[float], bool]:
    """Steps with three saves; whether the first was whole while it could not have been."""
    engine = engine_of(stage, 2, **more)
    steps = [step(engine, 0), step(engine, 1)]
    with held_back() if more else contextlib.nullcontext():
        engine.save_checkpoint(folder)
        steps += [step(engine, number) for number in range(2, 5)]
        early = Path(folder, "latest").exists()
    engine.save_checkpoint(folder)  # waits for the one before
    steps.append(step(engine, 5))
    engine.save_checkpoint(folder, tag="last")
    engine.destroy()  # waits, too
    return steps, early


def test_a_load_waits_for_the_save(tmp_path: Path) -> None:
    engine = engine_of(3, 1, **BESIDE)
    step(engine, 0)
    with held_back() as gate:
        engine.save_checkpoint(tmp_path)
        threading.Timer(0.2, gate.set).start()
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step1")
    engine.destroy()


def test_two_engines_save_into_one_folder(tmp_path: Path) -> None:
    real, both = os.replace, threading.Barrier(2)

    def together(beside: Path, path: Path) -> None:
        if Path(path).name == "latest":
            both.wait(240)
        real(beside, path)

    engines = [engine_of(1, 1, **BESIDE) for _ in range(2)]
    os.replace = together
    try:
        for number, engine in enumerate(engines):
            step(engine, number)
            engine.save_checkpoint(tmp_path, tag=f"of {number}")
        for engine in engines:
            engine.wait_for_checkpoint()
    finally:
        os.replace = real
    for number, engine in enumerate(engines):
        assert engine.load_checkpoint(tmp_path, tag=f"of {number}")[0] == str(tmp_path / f"of {number}")
        engine.destroy()


@pytest.mark.parametrize("stage", [3, *longer(1)])
def test_training_goes_on_and_what_is_written_is_of_the_step_of_the_call(
    pool: Pool, tmp_path: Path, stage: int
) -> None:
    beside = pool.run(2, train, stage, str(tmp_path / "beside"), BESIDE)
    plain = pool.run(2, train, stage, str(tmp_path / "plain"), {})
    assert [steps for steps, _ in beside] == [steps for steps, _ in plain]
    assert not any(early for _, early in beside), "it was whole before its files were synced"
    for tag in ("global_step2", "global_step5", "last"):
        assert same(tensors(tmp_path / "beside" / tag), tensors(tmp_path / "plain" / tag))
    assert (tmp_path / "beside" / "latest").read_text().strip() == "last"


def fail_beside(folder: str, world: int) -> dict[str, Any]:
    """The disk of the last rank fails once, beside the loop; then all is well."""
    real, rank = os.fsync, dist.get_rank()

    def broken(file: int) -> None:
        if os.path.isfile(f"/proc/self/fd/{file}") and rank == world - 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(file)

    engine = engine_of(2, world, **BESIDE)
    engine.save_checkpoint(folder, tag="good")
    engine.wait_for_checkpoint()
    os.fsync = broken
    errors, losses = [], []
    try:
        engine.save_checkpoint(folder, tag="bad")
        for number in range(200):
            try:
                losses.append(step(engine, number))
            except OSError as error:
                errors.append((number, error.errno, str(error)))
                break
        engine.save_checkpoint(folder, tag="bad")
        with pytest.raises(OSError, match="last checkpoint"):
            engine.save_checkpoint(folder, tag="never")
        engine.save_checkpoint(folder, tag="bad")
        with pytest.raises(OSError, match="last checkpoint"):
            engine.wait_for_checkpoint()
        engine.wait_for_checkpoint()  # once is enough
    finally:
        os.fsync = real
    done = engine.global_steps
    step(engine, 0)
    engine.save_checkpoint(folder, tag="better")
    engine.destroy()
    return {"errors": errors, "done": done}


@pytest.mark.parametrize("world", [1, 2])
def test_an_error_beside_the_loop_is_raised_by_all_ranks_after_the_same_step(
    pool: Pool, tmp_path: Path, world: int
) -> None:
    found = pool.run(world, fail_beside, str(tmp_path), world)
    assert all(one == found[0] for one in found)
    ((number, code, text),) = found[0]["errors"]
    assert found[0]["done"] == number + 1, "the step itself is not lost"
    assert code == errno.EIO
    assert "Input/output error" in text
    assert f"-0000{world - 1}-of-0000{world}." in text
    assert (f"rank {world - 1}: " in text) == (world > 1)
    assert sorted(os.listdir(tmp_path)) == ["better", "good", "latest"]
    assert (tmp_path / "latest").read_text().strip() == "better"
    tensors(tmp_path / "good")


PROGRAM = """
import os, sys, time
import torch.distributed as dist
from checkpoint_files import engine_of, step
import zero

zero.init_distributed()
world = dist.get_world_size() if dist.is_initialized() else 1
real = os.fsync
def slow(file):
    time.sleep(0.7)
    real(file)
engine = engine_of(3, world, zero={"checkpoint": {"async": True}})
step(engine, 0)
os.fsync = slow
engine.save_checkpoint(sys.argv[1])
if sys.argv[2] == "raises":
    raise KeyError("the script is wrong")
if sys.argv[2] == "leaves" and world > 1:
    dist.destroy_process_group()
"""


@pytest.mark.long
def test_the_end_of_the_program_waits_for_the_save(launchers: Launchers, tmp_path: Path) -> None:
    """Also after an exception, and after the process group was destroyed."""
    program, env = tmp_path / "program.py", environment()
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(tmp_path / "raises"), "raises"]
    alone = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = launchers.run("run", "--num_gpus", "2", str(program), str(tmp_path / "leaves"), "leaves", environment=env)
    said = {"raises": alone.communicate(timeout=240)[0], "leaves": run.stdout + run.stderr}
    assert "the script is wrong" in said["raises"]
    assert [alone.returncode, run.returncode] == [1, 0], said
    for name, text in said.items():
        assert (tmp_path / name / "latest").read_text().strip() == "global_step1", text
        tensors(tmp_path / name / "global_step1")
        assert len(index_of(tmp_path / name / "global_step1")["files"]) == (3 if name == "raises" else 6)
