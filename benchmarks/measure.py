"""What the benchmarks share: ranks, medians, markdown tables, and the line that says where it was measured."""

from __future__ import annotations

import json
import os
import pickle
import platform
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Peers call collectives by names that torch 2.13 has renamed; each rank would say so.
RENAMED = ".*(all_gather_into_tensor|reduce_scatter_tensor|_all_gather_base|_reduce_scatter_base).*"
SOCKETS = Path("/proc/self/io")  # Linux's count of what this process reads and writes


class Stat(NamedTuple):
    """A median and the range it comes from."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 0) -> str:
        return f"{self.median:,.{digits}f} [{self.low:,.{digits}f}-{self.high:,.{digits}f}]"


def stat(values: Sequence[float]) -> Stat:
    return Stat(statistics.median(values), min(values), max(values))


def paired(values: Sequence[float], others: Sequence[float]) -> Stat:
    """The ratio values[i] / others[i], taken pair by pair: what slows the machine down slows both of a pair."""
    return stat([value / other for value, other in zip(values, others, strict=True)])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, padded so that it reads well as text too."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


class Kept:
    """A file of JSON lines, one for each part of a measurement that is done: the next call goes on behind them."""

    def __init__(self, path: Path, seconds: float) -> None:
        """`seconds`: after which this call begins no further part."""
        self._path = path
        self._until = time.monotonic() + seconds
        self.parts: list[dict[str, Any]] = []
        if path.exists():
            self.parts = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def of(self, what: str) -> list[dict[str, Any]]:
        """Those of one kind, oldest first."""
        return [part for part in self.parts if part["what"] == what]

    def add(self, what: str, **values: Any) -> None:
        """Keep one more; it says on standard output that it is there."""
        part = {"what": what, **values}
        self.parts.append(part)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(part) + "\n")
        print(f"{what}: {values.get('name', len(self.of(what)))}", flush=True)

    def go_on(self) -> None:
        """End the program, with status 75, where the time of this call is over."""
        if time.monotonic() > self._until:
            print(f"{len(self.parts)} parts are in {self._path}; the same command goes on behind them", flush=True)
            sys.exit(75)


def machine_line() -> str:
    """Cores, kind of CPU, versions, date and command."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return (
        f"{cores} cores ({cpu}), {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{date.today().isoformat()}: `{command}`"
    )


def rotated(items: Sequence[Any], turn: int) -> list[Any]:
    """`items` from place `turn` on, then those before it: so that nobody is always the first."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def slowest(values: Sequence[float]) -> list[float]:
    """The maximum over ranks of each value; collective."""
    out = torch.tensor(values, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(out, op=dist.ReduceOp.MAX)
    return out.tolist()


def bytes_written() -> int:
    """Bytes this process has handed to write calls, which is how gloo sends; 0 where the system does not count."""
    if not SOCKETS.exists():
        return 0
    return int(dict(line.split(": ") for line in SOCKETS.read_text().splitlines())["wchar"])


def run_ranks(worker: Callable[..., Any], ranks: int, *args: Any, gpu: bool = False) -> Any:
    """Run `worker(rank, *args)` in `ranks` fresh processes, one thread each; returns what rank 0 returned.

    Over gloo, and the processes see no GPU; with `gpu` over NCCL, each on its GPU. An exception in one ends all and is
    raised here.
    """
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (ranks, folder, gpu, worker, args), nprocs=ranks)
        return pickle.loads((Path(folder) / "answer").read_bytes())


def _enter(rank: int, ranks: int, folder: str, gpu: bool, worker: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    warnings.filterwarnings("ignore", message=RENAMED, category=FutureWarning)
    torch.set_num_threads(1)
    if gpu:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=ranks)
    result = worker(rank, *args)
    if rank == 0:
        # A file, since a pipe that nobody reads before the ranks end would block on a long answer.
        (Path(folder) / "answer").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
