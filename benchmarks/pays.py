"""Does data parallelism pay here? One process beside 2 and 4 ranks, three sizes of model, and what `zero plan` says.

    python benchmarks/pays.py
    python benchmarks/pays.py --sizes small --ranks 1 2 --repeat 2

Each rank has the same micro-batch, so that n ranks do n times the work. The speedup is that of tokens per second
beside a single process; more ranks pay where it is at least 1 + (n - 1) / 2, as for `zero plan`. The share of
communication is by how much a step is longer than one without messages: measured, of as many ranks that train each
alone at the same time; planned, of a simulated step. Rates are measured for each number of ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import machine_line, run_ranks, slowest, stat, table
from torch.distributed.device_mesh import init_device_mesh
from variants import ADAMW
from variants import Setup as Sizes

import zero
from zero.config import load
from zero.sizes.choice import own_choice
from zero.sizes.rates import Rates, measured
from zero.sizes.search import Search, Setup
from zero.sizes.table import waits
from zero.sizes.trace import trace

SIZES = {
    "small": Sizes(width=128, layers=2, heads=2, vocab=256, context=64, batch=2, bf16=False),
    "middle": Sizes(width=256, layers=4, heads=4, vocab=512, context=128, batch=2, bf16=False),
    "large": Sizes(width=512, layers=6, heads=8, vocab=2048, context=256, batch=2, bf16=False),
}
STAGE = 1
WARMUP = 2
PAYS = 0.5  # of what each further rank could give


class Times(NamedTuple):
    """Seconds of a step, the median of the slowest rank: of ranks that train together, and of the same ones alone."""

    together: float
    alone: float


class Planned(NamedTuple):
    """Seconds of a step, and the share that messages make it longer by."""

    seconds: float
    share: float


def settings(sizes: Sizes) -> dict[str, Any]:
    """The JSON."""
    return {
        "train_micro_batch_size_per_gpu": sizes.batch,
        "steps_per_print": float("inf"),
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {"stage": STAGE},
    }


def seconds(rank: int, sizes: Sizes, repeat: int, mesh: Any) -> float:
    """Of a step on the ranks of `mesh`, None for all."""
    engine, *_ = zero.initialize(model=sizes.model(), config=settings(sizes), mesh_param=mesh)
    times = []
    for number in range(WARMUP + repeat):
        batch = sizes.data(number, rank)
        dist.barrier()
        begin = time.perf_counter()
        engine.backward(engine(*batch))
        engine.step()
        times.append(time.perf_counter() - begin)
    engine.destroy()
    return stat(slowest(times[WARMUP:])).median


def worker(rank: int, sizes: list[Sizes], repeat: int) -> list[Times]:
    """Each size; collective."""
    world = dist.get_world_size()
    if world == 1:
        return [Times(*[seconds(rank, each, repeat, None)] * 2) for each in sizes]
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ranks", "alone"))["alone"]
    return [Times(*(seconds(rank, each, repeat, mesh) for mesh in (None, alone))) for each in sizes]


def plan(sizes: Sizes, ranks: int, rates: Rates) -> Planned:
    """As `zero plan` says it."""
    with torch.device("meta"):
        model = sizes.model()
    config = load(settings(sizes), ranks, filled=False)
    setup = Setup(model, trace(model, sizes.data(0, 0), config, "cpu"), config, rates, ranks, False)
    row = Search(setup, own_choice(config)).row("none", sizes.batch)
    return Planned(row.step.step, waits(setup, row).longer if ranks > 1 else 0.0)


def pays(ranks: int, speedup: float) -> str:
    """The verdict."""
    return "yes" if speedup >= 1 + PAYS * (ranks - 1) else "no"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="whether more ranks pay, measured and planned")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="the first one is 1")
    parser.add_argument("--repeat", type=int, default=6, help="timed steps")
    args = parser.parse_args()
    if args.ranks[:1] != [1] or args.repeat < 1:
        parser.error("--ranks wants 1 first, --repeat at least 1")
    return args


def main() -> int:
    args = parse()
    sizes = [SIZES[name] for name in args.sizes]
    rates = {ranks: measured(ranks, "fp32", SIZES["middle"].width) for ranks in args.ranks}
    found = {ranks: run_ranks(worker, ranks, sizes, args.repeat) for ranks in args.ranks}
    lines, agree = [], True
    for at, name in enumerate(args.sizes):
        plans = {ranks: plan(sizes[at], ranks, rates[ranks]) for ranks in args.ranks}
        for ranks in args.ranks:
            seen, planned = found[ranks][at], plans[ranks]
            faster = ranks * found[1][at].together / seen.together
            foreseen = ranks * plans[1].seconds / planned.seconds
            same = pays(ranks, faster) == pays(ranks, foreseen)
            agree = agree and same
            cells = [f"{1e3 * seen.together:,.0f}", f"{1e3 * planned.seconds:,.0f}", f"{faster:.2f}", f"{foreseen:.2f}"]
            shares = [f"{max(0.0, 1 - seen.alone / seen.together):.0%}", f"{planned.share:.0%}"]
            verdicts = (
                ["-"] * 3 if ranks == 1 else [pays(ranks, faster), pays(ranks, foreseen), "yes" if same else "NO"]
            )
            lines.append([name, str(ranks), *cells, *shares, *verdicts])
    header = ["model", "ranks", "ms/step", "planned", "speedup", "planned", "communication", "planned", "pays"]
    print(f"{machine_line()}\n\n{table([*header, 'planned', 'agree'], lines)}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
