"""What checkpoints cost: GB/s of saving and loading, the stall of the training loop, and memory.

    python benchmarks/checkpoint.py --folder /mnt/drive
    python benchmarks/checkpoint.py --mib 64 --rounds 3 --ranks 1

Beside the raw file system (large writes and one fsync; reads into memory that is there), torch.distributed.checkpoint
and torch.save of the same state. All take turns within a round, in an order that rotates; medians over the rounds,
ratios pair by pair. What this version of zero does not know is left out, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import Stat, machine_line, paired, rotated, run_ranks, slowest, stat, table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import zero

MIB = 1 << 20
BLOCK = 16 * MIB  # bytes of one raw write or read
BLOCKS = 8  # layers of the model
STATE = 12  # bytes of each parameter in fp32: itself and Adam's two moments
WRITE, READ, STALL, MEMORY = 0.90, 0.90, 0.05, 1.0  # what is wanted
HEADER = 4 * MIB  # bytes of memory that are not counted against the snapshot: headers, index, buffers of libraries


def width_of(mib: int) -> int:
    """Rows and columns of each layer of a model whose checkpoint takes about `mib` MiB."""
    return max(64, math.isqrt(mib * MIB // STATE // BLOCKS) // 64 * 64)


def nbytes_of(mib: int) -> int:
    """Bytes of the state of that model, over all ranks."""
    return STATE * BLOCKS * width_of(mib) ** 2


def model(mib: int) -> nn.Module:
    width = width_of(mib)
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(BLOCKS)))


class Zero:
    """An engine with its whole optimizer state, which one step has made."""

    def __init__(self, folder: Path, args: argparse.Namespace, background: bool = False) -> None:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": args.batch,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": args.stage},
        }
        if background:
            config["zero"] = {"checkpoint": {"async": True}}
        self.folder, self.saves = folder, 0
        self.engine, *_ = zero.initialize(model=model(args.mib), config=config)
        generator = torch.Generator().manual_seed(self.engine.global_rank)
        self.x = torch.randn(args.batch, width_of(args.mib), generator=generator)
        self.step()

    def step(self) -> None:
        self.engine.backward(self.engine(self.x).square().mean())
        self.engine.step()

    def save(self) -> None:
        self.saves += 1
        self.engine.save_checkpoint(self.folder, tag=f"save-{self.saves}")

    def wait(self) -> None:
        """Until the last save is whole: `latest` is written last."""
        latest = self.folder / "latest"
        while not (latest.exists() and latest.read_text().strip() == f"save-{self.saves}"):
            time.sleep(0.001)

    def load(self) -> None:
        self.engine.load_checkpoint(self.folder)

    def clear(self) -> None:
        """Remove all saves, as the others do, so that no one finds less memory free than another."""
        barrier()
        if self.engine.global_rank == 0:
            for number in range(1, self.saves + 1):
                shutil.rmtree(self.folder / f"save-{number}", ignore_errors=True)
        barrier()


class State:
    """What the engine of `Zero` saves, as plain tensors: this rank's rows of each."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.rank, world = folder, dist.get_rank(), dist.get_world_size()
        if self.rank == 0:
            folder.mkdir()
        barrier()
        self.tensors: dict[str, torch.Tensor] = {}
        for name, param in model(args.mib).named_parameters():
            rows = param.detach().chunk(world)[self.rank].clone()
            self.tensors |= {name: rows, f"{name}/exp_avg": rows.clone(), f"{name}/exp_avg_sq": rows.clone()}


class Raw(State):
    """One file for each rank, the parameters first; a load reads what zero keeps, other ranks' parameters too."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        super().__init__(folder, args)
        world = dist.get_world_size()
        self.threads = args.threads or max(1, len(os.sched_getaffinity(0)) // world)
        order = sorted(self.tensors, key=lambda name: "/" in name)  # those of the optimizer last
        flat = torch.cat([self.tensors[name].flatten() for name in order])
        self.tensors = {}
        self.bytes = memoryview(flat.numpy()).cast("B")
        self.path = folder / f"raw-{self.rank}"
        weights = self.bytes.nbytes // 3  # as many bytes as each of Adam's moments has
        others = [rank for rank in range(world) if rank != self.rank] if args.stage < 3 else []
        self.reads = {self.path: self.bytes}
        for rank in others:
            self.reads[folder / f"raw-{rank}"] = memoryview(torch.ones(weights, dtype=torch.uint8).numpy()).cast("B")

    def save(self) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        for begin in range(0, self.bytes.nbytes, BLOCK):
            left = self.bytes[begin : begin + BLOCK]
            while left.nbytes:
                left = left[os.write(file, left) :]
        os.fsync(file)
        os.close(file)

    def load(self) -> None:
        files = {path: os.open(path, os.O_RDONLY) for path in self.reads}

        def read(path: Path, begin: int) -> None:
            left = self.reads[path][begin : begin + BLOCK]
            while left.nbytes:
                got = os.preadv(files[path], [left], begin)
                left, begin = left[got:], begin + got

        with ThreadPoolExecutor(self.threads) as pool:
            blocks = [(path, begin) for path, place in self.reads.items() for begin in range(0, place.nbytes, BLOCK)]
            list(pool.map(lambda block: read(*block), blocks))
        for file in files.values():
            os.close(file)

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)


class Dcp(State):
    """torch.distributed.checkpoint of DTensors that are cut by rows."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        super().__init__(folder, args)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.state = {name: DTensor.from_local(rows, mesh, [Shard(0)]) for name, rows in self.tensors.items()}

    def save(self) -> None:
        with quiet():
            dcp.save(self.state, checkpoint_id=self.folder / "dcp")

    def load(self) -> None:
        with quiet():
            dcp.load(self.state, checkpoint_id=self.folder / "dcp")

    def clear(self) -> None:
        barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        barrier()


class Torch(State):
    """torch.save of a dict of each rank, and one fsync; torch.load, and a copy into the tensors that are there."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        super().__init__(folder, args)
        self.path = folder / f"torch-{self.rank}"

    def save(self) -> None:
        with open(self.path, "wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> None:
        found = torch.load(self.path, weights_only=True)
        for name, values in self.tensors.items():
            values.copy_(found[name])

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)


OTHERS = {"raw": Raw, "torch.distributed.checkpoint": Dcp, "torch.save": Torch}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says on stderr about itself."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def barrier() -> None:
    dist.barrier()


def timed(work: Callable[[], None]) -> float:
    """Seconds of the slowest rank; all begin together."""
    barrier()
    begin = time.perf_counter()
    work()
    return slowest([time.perf_counter() - begin])[0]


def throughput(rank: int, args: argparse.Namespace, folder: Path) -> dict[tuple[str, str], list[float]]:
    """Seconds of each round by (who, "save" or "load")."""
    logging.getLogger("zero").setLevel(logging.ERROR)
    who: dict[str, Any] = {"zero": Zero(folder / "zero", args)}
    who |= {name: kind(folder / name, args) for name, kind in OTHERS.items()}
    for one in who.values():  # untimed: imports, first touch of memory
        one.save()
        one.load()
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(args.rounds):
        for name in rotated(list(who), turn):
            who[name].clear()
            seconds[name, "save"].append(timed(who[name].save))
        # Loads read what was saved just now, from the page cache.
        for name in rotated(list(who), turn):
            seconds[name, "load"].append(timed(who[name].load))
    return dict(seconds)


def copied(nbytes: int) -> Callable[[], None]:
    """Copies `nbytes` in host memory, to a place that has been written before."""
    source = torch.ones(nbytes // 4)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def stall(rank: int, args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds by what was measured, a value for each round, and the number of steps.

    plain, sync, async: so many steps, behind one save but for the first. sync call, async call: that save until the
    loop goes on. whole, at most: from the beginning of an asynchronous save until it is whole and the steps are done.
    copy: of the bytes of a snapshot.
    """
    logging.getLogger("zero").setLevel(logging.ERROR)
    sync = Zero(folder / "sync", args)
    background = Zero(folder / "async", args, background=True)
    copy = copied(nbytes_of(args.mib) // dist.get_world_size())
    copy()
    took = timed(sync.save)
    for _ in range(2):  # the first snapshot takes its memory
        background.save()
        background.wait()
        barrier()
    step = min(timed(sync.step) for _ in range(3))
    steps = max(3, math.ceil(2 * took / step))  # so that the background is through before the loop is
    found: dict[str, list[float]] = defaultdict(list)

    def loop(one: Zero, what: str) -> None:
        begin = time.perf_counter()
        if what != "plain":
            one.save()
            found[f"{what} call"].append(time.perf_counter() - begin)
        for _ in range(steps):
            one.step()
        found[what].append(time.perf_counter() - begin)
        if what == "async":
            one.wait()
            found["whole, at most"].append(time.perf_counter() - begin)

    for turn in range(args.rounds):
        for what in rotated(("plain", "sync", "async"), turn):
            one = background if what == "async" else sync
            barrier()
            loop(one, what)
            one.clear()
        found["copy"].append(timed(copy))
    return {name: slowest(found[name]) for name in sorted(found)} | {"steps": [steps]}


def memory(rank: int, args: argparse.Namespace, folder: Path, name: str, load: bool) -> tuple[float, float]:
    """The most bytes that one rank takes beyond what it had before, and the bytes that it saves or loads."""
    logging.getLogger("zero").setLevel(logging.ERROR)
    made = {**OTHERS, "zero": Zero, "zero, async": functools.partial(Zero, background=True)}
    one = made[name](folder / name, args)
    barrier()
    if load:
        one.save()
        if isinstance(one, Zero):
            one.wait()
        barrier()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    (one.load if load else one.save)()
    if isinstance(one, Zero):
        one.wait()
    peak = max(0, resident("VmHWM") - before)
    return slowest([peak])[0], nbytes_of(args.mib) / dist.get_world_size()


def resident(what: str) -> int:
    """Bytes of this process that are in memory now (VmRSS), or were at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024


def scratch(args: argparse.Namespace) -> Any:
    return tempfile.TemporaryDirectory(dir=args.folder, prefix="zero-checkpoint-")


def unknown(args: argparse.Namespace) -> str | None:
    """Why there is no asynchronous save to measure; None if there is."""
    keys = {"train_micro_batch_size_per_gpu": 1, "zero": {"checkpoint": {"async": True}}}
    try:
        zero.initialize(model=nn.Linear(2, 2), config=keys)[0].destroy()
    except ValueError as error:
        return str(error).splitlines()[-1].strip()
    return None


def throughput_part(args: argparse.Namespace, ranks: int) -> tuple[str, list[str]]:
    with scratch(args) as folder:
        seconds = run_ranks(throughput, ranks, args, Path(folder))
    rows, missed, nbytes = [], [], nbytes_of(args.mib)
    for what, wanted in (("save", WRITE), ("load", READ)):
        for name in ("zero", *OTHERS):
            took = seconds[name, what]
            rate = stat([nbytes / value / 1e9 for value in took])
            ratio = paired(seconds["raw", what], took)
            rows.append([name, what, rate.text(2), ratio.text(2)])
            if name == "zero" and ratio.median < wanted:
                missed.append(f"ranks {ranks}, {what}: {ratio.median:.2f} of raw; wanted {wanted:.2f}")
    return table(["who", "what", "GB/s", "of raw"], rows), missed


def milliseconds(values: list[float]) -> Stat:
    return stat([value * 1e3 for value in values])


def stall_part(args: argparse.Namespace, ranks: int) -> tuple[str, list[str]]:
    with scratch(args) as folder:
        found = run_ranks(stall, ranks, args, Path(folder))
    steps = int(found["steps"][0])
    sync = [one - plain for one, plain in zip(found["sync"], found["plain"], strict=True)]
    beyond = [max(0.0, call - copy) for call, copy in zip(found["async call"], found["copy"], strict=True)]
    loop = [one - plain - copy for one, plain, copy in zip(found["async"], found["plain"], found["copy"], strict=True)]
    lines = {
        f"{steps} steps": found["plain"],
        "synchronous save: the call": found["sync call"],
        "synchronous save: what the loop lasts longer": sync,
        "asynchronous save: the call": found["async call"],
        "copy of as many bytes in host memory": found["copy"],
        "asynchronous save: the call beyond the copy": beyond,
        "asynchronous save: what the loop lasts longer beyond the copy": loop,
        "asynchronous save: whole after, at most": found["whole, at most"],
    }
    call = paired(beyond, found["sync call"])
    whole = paired(loop, found["sync call"])
    rows = [[name, milliseconds(values).text(1)] for name, values in lines.items()]
    said = f"stall of the call beyond the copy, of a synchronous save: {call.text(3)}; of the loop: {whole.text(3)}"
    missed = [f"ranks {ranks}, stall: {call.median:.3f}; wanted {STALL}"] if call.median > STALL else []
    return f"{table(['what', 'ms'], rows)}\n\n{said}", missed


def memory_part(args: argparse.Namespace, ranks: int, background: bool) -> tuple[str, list[str]]:
    rows, missed = [], []
    names = ["zero", *(["zero, async"] if background else []), "torch.distributed.checkpoint", "torch.save"]
    for name in names:
        for load in (False, True):
            with scratch(args) as folder:
                peak, own = run_ranks(memory, ranks, args, Path(folder), name, load)
            what = "load" if load else "save"
            rows.append([name, what, f"{peak / MIB:,.1f}", f"{own / MIB:,.1f}", f"{peak / own:.2f}"])
            if name.startswith("zero") and peak > MEMORY * own + HEADER:
                missed.append(f"ranks {ranks}, memory of {name}, {what}: {peak / own:.2f} of the snapshot")
    return table(["who", "what", "MiB more at the peak", "MiB of state", "ratio"], rows), missed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="measure what checkpoints cost")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where files are written")
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint, over all ranks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256, help="rows of a micro-batch, for the training loop")
    parser.add_argument("--threads", type=int, default=0, help="of raw reads in each rank; 0: its share of the cores")
    parts = ("throughput", "stall", "memory")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    args = parser.parse_args()
    if min(args.mib, args.rounds, args.batch, *args.ranks) < 1 or args.threads < 0:
        parser.error("--mib, --rounds, --batch and --ranks want at least 1, and --threads at least 0")
    return args


def main() -> int:
    args = parse()
    logging.getLogger("zero").setLevel(logging.ERROR)
    reason = unknown(args)
    what = f"{nbytes_of(args.mib) / MIB:.0f} MiB of fp32 parameters with Adam's moments, stage {args.stage}"
    print(f"{machine_line()}\n{what}", flush=True)
    if reason is not None:
        print(f"asynchronous saves are left out: {reason}")
    missed: list[str] = []
    for ranks in args.ranks:
        parts: dict[str, Callable[[], tuple[str, list[str]]]] = {
            "throughput": functools.partial(throughput_part, args, ranks),
            "memory": functools.partial(memory_part, args, ranks, reason is None),
        }
        if reason is None:
            parts["stall"] = functools.partial(stall_part, args, ranks)
        for name, part in parts.items():
            if name in args.parts:
                text, offences = part()
                missed += offences
                print(f"\n{name}, {ranks} rank{'s' if ranks > 1 else ''}\n\n{text}", flush=True)
    print("\n" + ("\n".join(f"missed: {one}" for one in missed) or "all that is wanted is reached"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
