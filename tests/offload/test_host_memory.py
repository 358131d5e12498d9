"""The promise: host memory is what was announced: taken at once and exactly, given back, or refused before.

What a process holds is read from its page table (/proc/self/smaps), for the range of addresses of the arena.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from marks import longer

from zero.memory.available import available_nbytes, host_available
from zero.memory.pinned_arena import PinnedArena, check_room
from zero.plan.layout import make_layout
from zero.plan.memory import MIB, PAGE, HostBytes, host_table
from zero.plan.placement import Placement, Where, place
from zero.plan.units import ParamSpec, UnitPlan

CPU = torch.device("cpu")
LINUX = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="what a process holds is read from /proc")


def smaps(text: str, start: int, stop: int) -> dict[str, int]:
    """Bytes by kind, added over the mappings that lie in [start, stop); one that reaches out of it is an error."""
    found: dict[str, int] = {}
    inside = False
    for line in text.splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low < stop and high > start
            if inside and not (start <= low and high <= stop):
                raise AssertionError(f"a mapping from {low:x} to {high:x} is only partly of [{start:x}, {stop:x})")
        elif inside and rest[-1] == "kB":
            found[first[:-1]] = found.get(first[:-1], 0) + 1024 * int(rest[0])
    return found


def held(address: int, nbytes: int) -> dict[str, int]:
    return smaps(Path("/proc/self/smaps").read_text(), address, address + nbytes)


@LINUX
def test_memory_goes_back_with_the_last_tensor() -> None:
    arena = PinnedArena(4 * MIB, CPU, pinned=False)
    place = (arena.address, arena.nbytes)
    first, second = arena.take(MIB), arena.take(MIB)
    arena.close()
    with pytest.raises(RuntimeError, match="arena was closed"):
        arena.take(1)
    del first
    view = second.view(torch.float32)[3:]
    del second, arena
    gc.collect()
    view.fill_(1.0)  # still ours
    assert held(*place)["Rss"] == place[1]
    del view
    assert "Rss" not in held(*place)


CHILD = """
import os, sys
import torch
from zero.memory.pinned_arena import PinnedArena
arena = PinnedArena(1 << 21, torch.device("cpu"), False)
kept, dropped = arena.take(4096).fill_(7), arena.take(4096).fill_(7)
child = os.fork()
if child == 0:
    right = int(kept.sum()) == 0
    kept.fill_(9)
    del kept, dropped
    arena.close()
    os._exit(0 if right else 1)
_, status = os.waitpid(child, 0)
sys.stdout.write(f"{os.waitstatus_to_exitcode(status)} {int(kept.sum())} {int(dropped.sum())}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can wipe memory on a fork")
def test_a_forked_child_costs_nothing_and_harms_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert done.stdout == f"0 {7 * PAGE} {7 * PAGE}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to pin memory for")
def test_memory_that_cannot_be_pinned_is_still_memory(caplog: pytest.LogCaptureFixture) -> None:
    arena = PinnedArena(PAGE, torch.device("cuda", 0), pinned=True)
    assert not arena.pinned
    assert arena.take(PAGE).fill_(1).sum() == PAGE
    PinnedArena(PAGE, torch.device("cuda", 0), pinned=True)
    PinnedArena(PAGE, torch.device("cuda", 0), pinned=False)
    said = [record.getMessage() for record in caplog.records if "could not be pinned" in record.getMessage()]
    assert len(said) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU to pin memory for")
def test_pinned_memory_is_registered_until_it_goes_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    arena = PinnedArena(4 * MIB, device, pinned=True)
    assert arena.pinned
    taken = arena.take(MIB)
    assert taken.is_pinned()
    taken.copy_(torch.arange(MIB, device=device) % 251, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(taken, (torch.arange(MIB) % 251).to(torch.uint8))
    del taken, arena
    again = PinnedArena(4 * MIB, device, pinned=True)  # most likely at the same address, which must be free for it
    assert again.pinned


# Too little memory.

TABLE = host_table(HostBytes(300 * MIB, 600 * MIB, 0, 100 * MIB, 0, 0))


def test_too_little_memory_is_told_with_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero.memory.pinned_arena.available_nbytes", lambda ranks: 2000 * MIB // ranks)
    check_room(TABLE, 1000 * MIB, 2)
    with pytest.raises(RuntimeError, match="too little host memory") as caught:
        check_room(TABLE, 1000 * MIB + 1, 2)
    for part in (TABLE, "needs 1,000.0 MiB", "2 ranks on this host", "nvme", "8bit", "ratio", "more hosts"):
        assert part in str(caught.value)


def test_ranks_share_a_host_but_not_the_limit_of_a_process() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero.memory.available.host_available", lambda: 1000)
        patch.setattr("zero.memory.available.process_available", lambda: 400)
        assert available_nbytes(1) == 400
        assert available_nbytes(4) == 250
    with pytest.raises(RuntimeError, match="too little host memory"):
        check_room(TABLE, available_nbytes() // 2, 1000)


LIMITED = """
import resource, sys
import torch
from zero.memory.pinned_arena import PinnedArena, check_room
from zero.memory.available import process_available
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (512 << 20),) * 2)
sys.stdout.write(f"{process_available() >> 20}\\n")
for attempt in (lambda: check_room("  TABLE", 1 << 30, 1), lambda: PinnedArena(1 << 30, torch.device("cpu"), False)):
    try:
        attempt()
        sys.stdout.write("nothing\\n")
    except RuntimeError as error:
        sys.stdout.write(str(error).replace("\\n", " ") + "\\n")
"""


@LINUX
def test_a_limit_of_the_process_is_an_error_before_anything_is_taken() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    room, checked, taken = done.stdout.splitlines()
    assert 500 <= int(room) <= 512
    assert checked.startswith("too little host memory: each rank needs 1,024.0 MiB and may take 5")
    assert "TABLE" in checked
    assert taken.startswith("the system refused 1,024.0 MiB of host memory")


# What limits leave of a host's memory.


def hosted(root: Path, cgroup: str, groups: dict[str, tuple[str, int, int, str]]) -> Path:
    """A root with /proc and cgroups of version 2: limit, use, pages of files in it, and where the kernel slows down."""
    write(root / "proc/self/cgroup", cgroup)
    for name, (limit, current, files, high) in groups.items():
        for file, text in (("max", limit), ("high", high), ("current", current)):
            write(root / f"sys/fs/cgroup/{name}/memory.{file}", f"{text}\n")
        inactive = f"inactive_file {files - files // 4}\nactive_file {files // 4}\n"
        write(root / f"sys/fs/cgroup/{name}/memory.stat", f"anon 5\nfile {files}\n{inactive}")
    return root


def write(target: Path, text: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


PARENTS = {"user/job/task": ("max", 100, 0, "max"), "user": ("99000000", 3000000, 0, "max")}


@pytest.mark.parametrize(
    ("cgroup", "groups", "left"),
    [
        ("0::/user/job/task\n", {**PARENTS, "user/job": ("9000000", 3000000, 0, "max")}, 6000000),
        ("0::/user/job/task\n", {**PARENTS, "user/job": ("9000000", 3000000, 0, "8000000")}, 5000000),  # of a parent
        ("0::/job\n", {"job": ("9000000", 8900000, 8000000, "max")}, 8100000),  # pages of files can be had back
        ("0::/job\n", {"job": ("1000", 2000, 0, "max")}, 0),
        *((path, {"": ("3000000", 1000000, 0, "max")}, 2000000) for path in ("0::/../outside\n", "0::/not/here\n")),
        *((path, {}, 10**8) for path in ("0::/\n", "", "nonsense\n", "4:memory\n")),  # no limit that can be read
    ],
)
def test_limits_of_cgroups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup, groups, left) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**8))
    assert host_available(hosted(tmp_path, cgroup, groups)) == left


# An engine.

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


@LINUX
@pytest.mark.parametrize("what", ["both", *longer("optimizer")])
def test_the_log_says_what_the_process_grows_by(what: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = float(re.findall(r"host memory in all +([\d,.]+) MiB", done.stdout + done.stderr)[-1].replace(",", ""))
    grown = int(re.findall(r"grown by (\d+)", done.stdout)[0]) / 2**20
    assert said > 150
    assert grown == pytest.approx(said, rel=0.03)


# Where the state of each unit rests: whole units, the first ones on the device, no more than was allowed.


def units_of(*numels: int) -> list[UnitPlan]:
    specs = [ParamSpec(f"{index}.weight", numel, "bf16", True, 0) for index, numel in enumerate(numels)]
    return [UnitPlan(spec.name, "", (spec,), make_layout({spec.name: spec.numel}, 2)) for spec in specs]


def test_whole_units_stay_on_the_device_as_far_as_ratio_and_room_allow() -> None:
    device, host, file = Where.DEVICE, Where.HOST, Where.FILE
    units = units_of(320, 320, 320, 320)
    assert place(units, 2, host, device) == [Placement(host, device)] * 4
    # 160 elements of a shard may stay in memory.
    wanted = [Placement(device, host), Placement(device, file), Placement(host, file), Placement(host, file)]
    assert place(units, 2, host, file, ratio=0.5, max_in_cpu=160) == wanted
    # A quarter and a bit on the device: one unit fits, two do not.
    assert [each.optimizer for each in place(units, 2, file, device, ratio=0.7)] == [device, file, file, file]
    # The first one is too large for a half; the others go on the device in its place as long as there is room.
    wide = units_of(3200, 320, 320, 320)
    assert [each.optimizer for each in place(wide, 2, host, device, ratio=0.8)] == [host, device, device, host]
