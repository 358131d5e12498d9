"""How fast scratch files are written and read beside what `fio`, or `dd` with direct I/O, does on the same drive.

    python benchmarks/scratch.py --folder /mnt/nvme --gib 2 --rounds 5

All take turns within a round, in an order that rotates; medians over the rounds, ratios pair by pair. Each writes and
reads a file of its own in the folder; every file is written once before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import machine_line, paired, stat, table

from zero.kernels.aio import BACKENDS, Aio, Request, ScratchFile, aligned

CHUNK = 64 << 20  # bytes of one request; two are in flight, as in a pipeline
TARGET = 0.85


class Ours:
    """One backend."""

    def __init__(self, folder: Path, nbytes: int, args: argparse.Namespace, backend: str) -> None:
        self.aio = Aio(args.threads, args.depth, args.block, backend)
        self.file = ScratchFile(folder, nbytes, backend)
        self.buffers = [aligned(CHUNK).random_(0, 256) for _ in range(2)]

    def move(self, write: bool) -> None:
        start = self.aio.write if write else self.aio.read
        flying: list[Request] = []
        for turn, offset in enumerate(range(0, self.file.nbytes, CHUNK)):
            if len(flying) == 2:
                flying.pop(0).wait()
            flying.append(start(self.file, self.buffers[turn % 2], offset))
        for request in flying:
            request.wait()


class Dd:
    """`dd` with direct I/O, with the best of a few block sizes that a short run finds."""

    name = "dd"

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.path, self.nbytes = folder / "dd", nbytes
        self.move(True, 16)
        self.mib = min((1, 4, 16, 64), key=lambda mib: min(timed(lambda: self.move(False, mib)) for _ in range(2)))

    def move(self, write: bool, mib: int | None = None) -> None:
        mib = mib or self.mib
        ends = (
            ["if=/dev/zero", f"of={self.path}", "oflag=direct", "conv=notrunc"]
            if write
            else [f"if={self.path}", "of=/dev/null", "iflag=direct"]
        )
        subprocess.run(["dd", *ends, f"bs={mib}M", f"count={self.nbytes // (mib << 20)}", "status=none"], check=True)

    def text(self) -> str:
        return f"dd bs={self.mib}M, direct"


class Fio:
    """`fio` with the block size, depth and number of jobs that ours has."""

    name = "fio"

    def __init__(self, folder: Path, nbytes: int, args: argparse.Namespace) -> None:
        self.path, self.nbytes, self.args = folder / "fio", nbytes, args
        engines = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True, check=True).stdout
        self.engine = next(name for name in ("io_uring", "libaio", "psync") if name in engines)
        self.move(True)

    def move(self, write: bool) -> float:
        """Seconds that fio itself says it took: its start is not the drive's."""
        command = [
            "fio", "--name=zero", f"--filename={self.path}", f"--rw={'write' if write else 'read'}", "--direct=1",
            f"--ioengine={self.engine}", f"--bs={self.args.block}", f"--iodepth={self.args.depth}",
            f"--size={self.nbytes}", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout)["jobs"][0]["write" if write else "read"]
        return job["runtime"] / 1e3

    def text(self) -> str:
        return f"fio {self.engine}, the same block and depth"


def timed(move: Callable[[], float | None]) -> float:
    begin = time.perf_counter()
    said = move()
    return time.perf_counter() - begin if said is None else said


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[tuple[str, bool], list[float]], str, str]:
    """Seconds of each round by (who, write), the name of the yardstick, and what it is."""
    nbytes = int(args.gib * (1 << 30)) // CHUNK * CHUNK
    ours = {}
    for backend in BACKENDS:
        try:
            ours[backend] = Ours(folder, nbytes, args, backend)
        except RuntimeError as error:
            print(f"left out: {error}")
    for one in ours.values():
        one.move(True)
    other = Fio(folder, nbytes, args) if shutil.which("fio") else Dd(folder, nbytes)
    moves = {**{name: one.move for name, one in ours.items()}, other.name: other.move}
    names = list(moves)
    seconds: dict[tuple[str, bool], list[float]] = {}
    for turn in range(args.rounds):
        for write in (True, False):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                took = timed(lambda name=name, write=write: moves[name](write))
                seconds.setdefault((name, write), []).append(took)
    return seconds, other.name, other.text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=2.0, help="size of each file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--block", type=int, default=1 << 20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        seconds, other, text = measure(args, Path(folder))
    nbytes = int(args.gib * (1 << 30)) // CHUNK * CHUNK
    rows, ours = [], {}
    for (name, write), took in seconds.items():
        rate = stat([nbytes / value / 1e9 for value in took])
        ratio = paired(seconds[other, write], took)
        rows.append([name, "write" if write else "read", rate.text(2), ratio.text(2)])
        if name != other:
            ours.setdefault(write, ratio.median)  # of the backend that is taken by default
    print(f"{machine_line()}\n{args.gib} GiB, block {args.block}, depth {args.depth}, workers {args.threads}; {text}\n")
    print(table(["who", "what", "GB/s", f"of {other}"], rows))
    default = next(iter(seconds))[0]
    print(f"\n{default} reaches {ours[True]:.2f} writing and {ours[False]:.2f} reading; wanted {TARGET}")
    return 0 if all(ratio >= TARGET for ratio in ours.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
