"""The promise: a save that fails, on any rank and in any way, leaves the former checkpoint, and no rank waits for ever.

Full disks are file size limits here, which come back from the system as EFBIG.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_files import engine_of, same, step, tensors
from models import make_net
from nodes import environment
from ports import free_port
from ranks import Pool


def fill(folder: str, which: int) -> dict[str, Any]:
    """A save that finds no room on rank `which`, another in the same place, and the run goes on."""
    engine = engine_of(3, 2, make_net(width=256))
    step(engine, 0)
    engine.save_checkpoint(folder, tag="former")
    step(engine, 1)
    former = sorted(os.listdir(f"{folder}/former"))
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = []
    try:
        if dist.get_rank() == which:
            # Its weights have room, its moments have not: some files of the save are there when it fails. The limit is
            # also that of the file through which the ranks of the tests talk, which grows as long as they wait.
            resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 19, before[1]))
        for tag in ("new", "former"):
            with pytest.raises(OSError) as error:
                engine.save_checkpoint(folder, tag=tag)
            said.append((error.value.errno, str(error.value)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    dist.barrier()  # each rank removes its own files
    left = (sorted(os.listdir(folder)), sorted(os.listdir(f"{folder}/former")) == former)
    step(engine, 2)
    engine.save_checkpoint(folder, tag="better")
    engine.destroy()
    return {"said": said, "left": left}


@pytest.mark.parametrize("which", [0, 1])
def test_a_full_disk_is_an_error_on_all_ranks_that_names_rank_and_file(pool: Pool, tmp_path: Path, which: int) -> None:
    found = pool.run(2, fill, str(tmp_path), which)
    assert found[0]["said"] == found[1]["said"]
    for code, text in found[0]["said"]:
        assert code == errno.EFBIG
        assert f"rank {which}: {os.strerror(errno.EFBIG)}" in text
        assert f"moments-0000{which}-of-00002" in text
    assert found[0]["left"] == (["former", "latest"], True)
    assert (tmp_path / "latest").read_text().strip() == "better"
    tensors(tmp_path / "former")
    tensors(tmp_path / "better")


PROGRAM = """
import contextlib, gc, json, os, signal, sys, traceback
import torch
from checkpoint_files import engine_of, step
import zero
from zero.watchdog import store_barrier

store_barrier.GRACE = 1.0

def save(folder, what, which, beside):
    zero.init_distributed()
    engine = engine_of(2, 2, zero={"checkpoint": {"async": beside}})
    step(engine, 0)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    step(engine, 1)
    if not beside:
        engine._saving.barrier.timeout = 4.0
    if int(os.environ["RANK"]) == which:
        def ends(file):
            os.kill(os.getpid(), getattr(signal, what))
        os.fsync = ends
    try:
        engine.save_checkpoint(folder)
        with contextlib.suppress(RuntimeError):
            step(engine, 2)
        engine.wait_for_checkpoint()
    except Exception as error:
        sys.stdout.write(f"said: {type(error).__name__}: {error}\\n")
        sys.stdout.flush()
        os._exit(3)

torch.set_num_threads(1)
zero.initialize  # imports, here for all ranks, what each would import for itself
gc.freeze()
good, bad = [], []
for folder, what, which, beside, port in json.loads(sys.argv[1]):
    for rank in range(2):
        if pid := os.fork():
            (bad if rank == which else good).append(pid)
            continue
        os.dup2(os.open(f"{folder}-{rank}", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        try:
            save(folder, what, which, beside)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in good]))
for pid in bad:
    os.kill(pid, signal.SIGKILL)
"""


def test_a_rank_that_is_killed_or_stops_is_named(tmp_path: Path) -> None:
    cases = {
        ("SIGKILL", 1, False): "rank 1 has made no progress",
        ("SIGKILL", 0, False): "the store of the process group is gone",
        ("SIGSTOP", 0, False): "has not answered for|rank 0 has made no progress",
        ("SIGSTOP", 1, False): "rank 1 has made no progress",
        ("SIGKILL", 1, True): "in vain: rank 1 gone: not heard of for more than 2 s",  # its time-out is 600 s
    }
    folders = {case: tmp_path / f"{case[0]}{case[1]}{case[2]}" for case in cases}
    words = json.dumps([(str(folder), *case, free_port()) for case, folder in folders.items()])
    command = [sys.executable, "-c", PROGRAM, words]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        try:
            codes = json.loads(program.communicate(timeout=400)[0])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # with its ranks
    said = {case: Path(f"{folder}-{1 - case[1]}").read_text() for case, folder in folders.items()}
    assert codes == [3] * len(cases), said
    for case, pattern in cases.items():
        text = said[case].partition("said: ")[2]
        assert any(part in text for part in pattern.split("|")), text
        assert (folders[case] / "latest").read_text().strip() == "global_step1"
        assert not (folders[case] / "global_step2" / "index.json").exists()
        assert same(tensors(folders[case] / "global_step1"), tensors(folders["SIGKILL", 1, False] / "global_step1"))
