"""How long `zero run` takes from the command to the end of the first collective, beside torchrun: whole jobs, in turns.

    python benchmarks/launch.py --ranks 2 --rounds 15

The script is the same: it imports torch, joins a gloo group and adds up one number. Also: until the first rank's first
line of Python runs, which is the launcher's own part, and until the command is back.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from measure import machine_line, paired, rotated, stat, table

TARGET = 1.15
SCRIPT = """
import time
began = time.time()
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(f"{began!r} {time.time()!r}")
dist.destroy_process_group()
"""


class Times(NamedTuple):
    """Seconds from the command until the first rank runs, the last is through the collective, and all have ended."""

    rank: float
    collective: float
    end: float


def commands(ranks: int) -> dict[str, list[str]]:
    """The launchers, each for `ranks` ranks of this machine."""
    python = [sys.executable, "-m"]
    return {
        "zero run": [*python, "zero", "run", "--num_gpus", str(ranks)],
        "torchrun": [*python, "torch.distributed.run", "--nproc_per_node", str(ranks)],
        "torchrun --standalone": [*python, "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)],
    }


def times_of(command: list[str], folder: Path) -> Times:
    """One job, from a fresh command."""
    # The ranks share no cores with the user's other threads, and see no GPU; bytecode is kept, as it is for users.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(dir=folder) as out:
        start = time.time()  # the ranks' clock is of other processes
        words = [*command, str(folder / "script.py"), out]
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        end = time.time()
        if ended.returncode:
            sys.exit(f"{' '.join(words)}: {ended.stderr}")
        ranks = [[float(word) for word in path.read_text().split()] for path in Path(out).iterdir()]
    began, through = min(rank[0] for rank in ranks), max(rank[1] for rank in ranks)
    return Times(began - start, through - start, end - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="time `zero run` from the command to the first collective")
    parser.add_argument("--ranks", type=int, default=2, help="processes of a job")
    parser.add_argument("--rounds", type=int, default=15, help="jobs of each launcher")
    args = parser.parse_args()
    ways = commands(args.ranks)
    found: dict[str, list[Times]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(SCRIPT)
        for command in ways.values():  # so that every file is in the page cache and has its bytecode
            times_of(command, Path(folder))
        for turn in range(args.rounds):
            for name in rotated(list(ways), turn):
                found[name].append(times_of(ways[name], Path(folder)))
    columns = {name: [list(column) for column in zip(*times, strict=True)] for name, times in found.items()}
    ours, theirs = columns["zero run"][1], columns["torchrun"][1]
    rows = [[name, *(stat(column).text(2) for column in own)] for name, own in columns.items()]
    ratio = stat(ours).median / stat(theirs).median
    verdict = "within" if ratio <= TARGET else "ABOVE"
    print(machine_line())
    print(f"\n{args.ranks} gloo ranks, {args.rounds} jobs of each launcher, s from the command, median [min-max]\n")
    print(table(["", "first rank runs", "first collective done", "command is back"], rows))
    medians = f"{stat(ours).median:.2f} / {stat(theirs).median:.2f} s"
    print(f"\nto the first collective, zero run / torchrun: {medians} = {ratio:.3f}, {verdict} {TARGET}; ", end="")
    print(f"in pairs {paired(ours, theirs).text(3)}")


if __name__ == "__main__":
    main()
