"""What the log says at the start of host memory is what the process grows by, and was free for all ranks of a host."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from marks import longer
from models import config, make_net
from offload_cases import OPTIMIZER

import zero
import zero.core.offload
from zero.memory.pinned_arena import PinnedArena, check_room

PROGRAM = """
import ctypes, gc, re, sys
import torch
import zero


def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        found = dict(re.findall(r"(\\w+): +(\\d+) kB", file.read()))
    return 1024 * (int(found["Rss"]) + int(found["Swap"]))


def engine_of(width, layers, places):
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    before, nbytes = held(), sum(param.nbytes for param in model.parameters())
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3 if "offload_param" in places else 1, **places},
    }
    engine, *_ = zero.initialize(model=model, config=config)
    loss = engine(torch.ones(1, width)).sum()
    return engine, loss, before, nbytes


cpu = {"device": "cpu"}
places = {"offload_optimizer": cpu, **({"offload_param": cpu} if sys.argv[1] == "both" else {})}
engine, loss, *_ = engine_of(64, 1, places)  # what is loaded once is not counted
engine.backward(loss)
engine.step()
engine.destroy()
engine, loss, before, nbytes = engine_of(2048, 4, places)
del loss
# Parameters that moved to the host are not where they were any more.
moved = nbytes if sys.argv[1] == "both" else 0
print("grown by", held() - before + moved)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["both", *longer("optimizer")])
def test_the_log_says_what_the_process_grows_by(what: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = float(re.findall(r"host memory in all +([\d,.]+) MiB", done.stdout + done.stderr)[-1].replace(",", ""))
    grown = int(re.findall(r"grown by (\d+)", done.stdout)[0]) / 2**20
    assert said > 150
    assert grown == pytest.approx(said, rel=0.03)


@pytest.mark.ranks(2)
def test_all_ranks_of_a_host_see_the_same_memory(tmp_path: Path) -> None:
    """A rank that looks at the free memory late finds that another one has taken of it already."""
    taken, found = tmp_path / "taken", []

    def check(*args: Any) -> None:
        if dist.get_rank() == 1:
            for _ in range(20):
                threading.Event().wait(0.01)
                found.append(taken.exists())
        check_room(*args)

    def take(*args: Any) -> PinnedArena:
        taken.touch()
        return PinnedArena(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.core.offload, "check_room", check)
        patch.setattr(zero.core.offload, "PinnedArena", take)
        section = {"zero_optimization": {"stage": 1, **OPTIMIZER}}
        zero.initialize(model=make_net(blocks=1), config=config(1, 2, **section))[0].destroy()
    assert not any(found)
