"""Ways to do ZeRO's two collectives on gloo, interleaved: native, built from other collectives, and zero's own.

    python benchmarks/collectives.py --ranks 2 4

All ways of one collective start from the same input and must end with the same values, which is checked before
anything is timed. A time is the maximum over ranks.
"""

from __future__ import annotations

import argparse
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from measure import machine_line, paired, rotated, run_ranks, slowest, stat, table
from torch import Tensor

from zero.core import comm
from zero.core.comm import Axis

# torch 2.13 renamed both; older releases have only the second name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TAG = 7
NATIVE = "native"


class Case(NamedTuple):
    """What is moved: the name of the collective, MiB that its full buffer has (or would have) in fp32, the dtype."""

    kind: str
    mib: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.mib * 2**20 // 4

    def text(self) -> str:
        return f"{self.kind}, {self.numel * self.dtype.itemsize / 2**20:g} MB {str(self.dtype).removeprefix('torch.')}"


Way = Callable[[], Tensor]


def reduce_scatters(flat: Tensor, axis: Axis) -> dict[str, Way]:
    """Ways to sum the ranks' `flat` [ranks x n] and keep our slice [n]. None of them may change `flat`."""
    numel = flat.numel() // axis.size
    own = torch.empty(numel, dtype=flat.dtype)
    spare = torch.empty_like(flat)
    rows = torch.empty((axis.size, numel), dtype=flat.dtype)
    total = torch.empty(numel, dtype=torch.float32)

    def native() -> Tensor:
        reduce_scatter(own, flat)
        return own

    def by_all_reduce() -> Tensor:
        spare.copy_(flat)  # all_reduce works in place; a caller that may lose `flat` would save this copy
        dist.all_reduce(spare)
        return spare.narrow(0, axis.rank * numel, numel)

    def by_all_to_all() -> Tensor:
        dist.all_to_all_single(rows.view(-1), flat)
        total.copy_(rows[0])
        for row in rows[1:]:
            total.add_(row)
        return total

    def ours() -> Tensor:
        comm.scatter(flat, axis, TAG).sum(total, False)
        return total

    return {NATIVE: native, "all_reduce + slice": by_all_reduce, "all_to_all + sum": by_all_to_all, "zero": ours}


def all_gathers(shard: Tensor, axis: Axis) -> dict[str, Way]:
    """Ways to line up the ranks' `shard` [n] in one tensor [ranks x n]."""
    full = torch.empty(axis.size * shard.numel(), dtype=shard.dtype)
    slices = full.chunk(axis.size)

    def native() -> Tensor:
        all_gather(full, shard)
        return full

    def by_broadcasts() -> Tensor:
        slices[axis.rank].copy_(shard)
        works = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(slices)]
        for work in works:
            work.wait()
        return full

    def ours() -> Tensor:
        slices[axis.rank].copy_(shard)
        comm.gather(full, axis, TAG).wait()
        return full

    return {NATIVE: native, "broadcasts": by_broadcasts, "zero": ours}


def ways_of(case: Case, axis: Axis) -> dict[str, Way]:
    generator = torch.Generator().manual_seed(axis.rank)
    # Whole numbers below 16: their sums are exact in bf16 too, so that all ways must agree to the bit.
    flat = torch.randint(16, (case.numel,), generator=generator).to(case.dtype)
    if case.kind == "reduce-scatter":
        return reduce_scatters(flat, axis)
    return all_gathers(flat[: case.numel // axis.size].clone(), axis)


def check(case: Case, ways: dict[str, Way]) -> None:
    """Raise RuntimeError for a way that does not give what the native collective gives."""
    expected = ways[NATIVE]().float().clone()
    for name, way in ways.items():
        if not torch.equal(way().float(), expected):
            raise RuntimeError(f"{case.text()}: '{name}' differs from the native collective")


def worker(rank: int, ranks: int, cases: list[Case], repeat: int) -> dict[Case, dict[str, list[float]]]:
    """Seconds of every repetition of every way of every case."""
    axis = Axis(weakref.ref(dist.group.WORLD), ranks, rank, native=False)
    seconds: dict[Case, dict[str, list[float]]] = {}
    for case in cases:
        ways = ways_of(case, axis)
        check(case, ways)
        seconds[case] = {name: [] for name in ways}
        for turn in range(repeat):
            for name in rotated(list(ways), turn):
                dist.barrier()
                start = time.perf_counter()
                ways[name]()
                seconds[case][name] += slowest([time.perf_counter() - start])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="time ways to reduce-scatter and all-gather over gloo")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, nargs="+", default=[25, 1], help="size of the full buffer in fp32")
    parser.add_argument("--repeat", type=int, default=21, help="repetitions of each way")
    args = parser.parse_args()
    cases = [
        Case(kind, mib, dtype)
        for kind in ("reduce-scatter", "all-gather")
        for mib in args.mib
        for dtype in (torch.float32, torch.bfloat16)
    ]
    print(machine_line())
    for ranks in args.ranks:
        seconds = run_ranks(worker, ranks, ranks, cases, args.repeat)
        rows = [
            [case.text(), name, stat([1e3 * value for value in times]).text(2), paired(times, ways[NATIVE]).text(2)]
            for case, ways in seconds.items()
            for name, times in ways.items()
        ]
        print(f"\n{ranks} ranks of 1 thread, {args.repeat} repetitions, median [min-max]\n")
        print(table(["collective", "way", "ms", "ratio to native"], rows))


if __name__ == "__main__":
    main()
