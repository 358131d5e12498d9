"""Speed of the CPU kernels, beside the memory's own for the same reads and writes, and beside torch and DeepSpeed.

    python benchmarks/kernels.py --numel 100M 400M --threads 1 2

Each number of threads has a process of its own. Before a group of kernels is timed, each is checked against its
reference in plain torch, bit by bit, and the peers against ours, about. Then all of a group take turns, --rounds times,
in an order that rotates; ratios are taken round by round before their median is. DeepSpeed takes part where it is
installed: `make peers`, then `.venv-peers/bin/python benchmarks/kernels.py`.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_peers
import torch
from kernel_stream import Mix, Yardstick
from kernel_variants import GROUPS, Group, Way
from measure import machine_line, paired, rotated, stat, table

from zero.kernels import native

SMALL = 100_003  # elements of the check
SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9}
Times = dict[str, list[float]]  # seconds, round by round


def numel(text: str) -> int:
    """`100M` as 100000000."""
    factor = SUFFIXES.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="time the CPU kernels beside the memory, torch and DeepSpeed")
    parser.add_argument("--numel", type=numel, nargs="+", default=[10**8], metavar="N", help="elements, such as 100M")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)  # this is one of the processes: its threads
    args = parser.parse_args()
    if min(args.numel) < 1000 or min(args.threads) < 1 or args.rounds < 1:
        parser.error("--numel wants at least 1000, --threads and --rounds at least 1")
    return args


def check(name: str, peers: dict[str, kernel_peers.Make]) -> None:
    """Raise RuntimeError unless all of the group compute what they should."""
    for way in GROUPS[name](SMALL, {}).ways:
        way.check()
    if not GROUPS[name](SMALL, peers).peers:
        return
    ours = GROUPS[name](SMALL, {})
    ours.ways[0].run()
    for title, make in peers.items():
        theirs = GROUPS[name](SMALL, {title: make})
        theirs.peers[title]()
        near = ours.result.dtype == torch.float32
        torch.testing.assert_close(theirs.result, ours.result, rtol=1e-5 if near else 1e-2, atol=1e-6)


def measure(runs: dict[str, Callable[[], Any]], rounds: int) -> Times:
    """Seconds of each, in every round."""
    for run in runs.values():
        run()
    times: Times = {title: [] for title in runs}
    for turn in range(rounds):
        for title in rotated(list(runs), turn):
            begin = time.perf_counter()
            runs[title]()
            times[title].append(time.perf_counter() - begin)
    return times


def yardstick_title(mix: Mix) -> str:
    names = ("read", "update", "write")
    parts = [f"{name} {'+'.join(map(str, part))}" for name, part in zip(names, mix.sizes(), strict=True) if part]
    return f"yardstick: {', '.join(parts)}"


def judge(way: Way, share: float, ratios: dict[str, float]) -> tuple[str, str]:
    """The targets in words, and whether they are met."""
    wanted, met = [], []
    if way.share is not None:
        wanted.append(f"share >= {way.share:.2f}")
        met.append(share >= way.share)
    if way.ratio is not None:
        against = [ratio for title, ratio in ratios.items() if not way.against or title in way.against]
        who = "torch" if way.against else "peers"
        wanted.append(f"time <= {way.ratio:.2f} of {who}")
        met += [ratio <= way.ratio for ratio in against]
    return ", ".join(wanted) or "-", ("yes" if all(met) else "NO") if met else "-"


def report(group: Group, times: Times, count: int) -> str:
    """The table of a group."""
    header = ["", "ns/param", "B/param", "GB/s", "share", *(f"time / {peer}" for peer in group.peers), "target", "met"]
    rows = []
    mixes = {way.title: way.mix for way in group.ways} | dict.fromkeys(group.peers, group.peer_mix)
    mixes |= {yardstick_title(way.mix): way.mix for way in group.ways}
    ways = {way.title: way for way in group.ways}
    for title, mix in mixes.items():
        spent, nbytes = times[title], mix.nbytes()
        nanoseconds = stat([1e9 * seconds / count for seconds in spent])
        row = [title, nanoseconds.text(3), str(nbytes), f"{nbytes / nanoseconds.median:.1f}"]
        if title in ways:
            share = paired(times[yardstick_title(mix)], spent)
            ratios = {peer: paired(spent, times[peer]) for peer in group.peers}
            row += [share.text(2), *(ratio.text(2) for ratio in ratios.values())]
            row += judge(ways[title], share.median, {peer: ratio.median for peer, ratio in ratios.items()})
        rows.append(row + ["-"] * (len(header) - len(row)))
    return table(header, rows)


def process(args: argparse.Namespace) -> None:
    """All measurements with one number of threads."""
    torch.set_num_threads(args.process)
    if native.load() is None:
        raise SystemExit("there are no compiled kernels to measure")
    peers, yardstick = kernel_peers.available(), Yardstick()
    for name in args.groups:
        check(name, peers)
        for count in args.numel:
            group = GROUPS[name](count, peers)
            runs: dict[str, Callable[[], Any]] = {way.title: way.run for way in group.ways}
            runs |= {yardstick_title(way.mix): yardstick.over(way.mix) for way in group.ways}
            times = measure(runs | group.peers, args.rounds)
            threads = f"{args.process} thread{'s' * (args.process > 1)}"
            print(f"{group.title}: {count / 1e6:g}M elements, {threads}, {native.isa()}\n")
            print(f"{report(group, times, count)}\n", flush=True)
            del group, runs, times
            gc.collect()  # the peers' optimizers and parameters refer to each other


def main() -> None:
    args = parse()
    if args.process is not None:
        process(args)
        return
    print(f"{machine_line()}\n\n{args.rounds} rounds, median [min-max]\n", flush=True)
    if kernel_peers.DEEPSPEED not in kernel_peers.available():
        print("DeepSpeed is not installed beside this Python and not measured; `make peers` installs it.\n", flush=True)
    for threads in args.threads:
        # DeepSpeed takes its threads from the environment. Passive: the idle threads of one library must not spin on
        # the cores on which the next one is timed.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--process", str(threads)]
        subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
