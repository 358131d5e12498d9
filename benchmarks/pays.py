"""Does data parallelism pay? One process beside 2 and 4 ranks, three sizes of model: measured and planned.

    python benchmarks/pays.py --kept pays.jsonl --seconds 200     # again and again, until benchmarks/pays.md is written

Each rank has the same micro-batch and one thread, so that n ranks do n times the work. The speedup is that of tokens
per second beside a single process; more ranks pay where it is at least 1 + (n - 1) / 2. It is measured, and simulated
by `zero plan` with rates that are measured right before for each number of ranks. The share of communication is by how
much a step is longer than one without messages: measured, of as many ranks that train each alone at the same time;
planned, of a simulated step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import Kept, machine_line, run_ranks, slowest, stat, table
from torch.distributed.device_mesh import init_device_mesh
from variants import ADAMW
from variants import Setup as Sizes

import zero
from zero.config import load
from zero.sizes.choice import own_choice
from zero.sizes.model_trace import trace
from zero.sizes.rates import Rates
from zero.tools.plan.rank_rates import measured
from zero.tools.plan.search import Search, Setup
from zero.tools.plan.table import enough, waits

SIZES = {
    "small": Sizes(width=128, layers=2, heads=2, vocab=256, context=64, batch=2, bf16=False),
    "middle": Sizes(width=256, layers=4, heads=4, vocab=512, context=128, batch=2, bf16=False),
    "large": Sizes(width=512, layers=6, heads=8, vocab=2048, context=256, batch=2, bf16=False),
}
STAGE = 1
LIMITS = "The two verdicts: measured / planned."
WARMUP = 5  # steps


class Times(NamedTuple):
    """Seconds of a step, the median of the slowest rank: of ranks that train together, and of the same ones alone."""

    together: float
    alone: float


class Foreseen(NamedTuple):
    """Seconds of a step, and the share that messages make it longer by."""

    step: float
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


def worker(rank: int, sizes: Sizes, repeat: int) -> Times:
    """Both ways; collective."""
    world = dist.get_world_size()
    together = seconds(rank, sizes, repeat, None)
    if world == 1:
        return Times(together, together)
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ranks", "alone"))["alone"]
    return Times(together, seconds(rank, sizes, repeat, alone))


def plan(sizes: Sizes, ranks: int, rates: Rates) -> Foreseen:
    """As `zero plan` says it."""
    with torch.device("meta"):
        model = sizes.model()
    config = load(settings(sizes), ranks, filled=False)
    setup = Setup(model, trace(model, sizes.data(0, 0), config, "cpu"), config, rates, ranks, False)
    row = Search(setup, own_choice(config)).row("none", sizes.batch)
    return Foreseen(row.step.step, waits(setup, row).longer if ranks > 1 else 0.0)


def measure(kept: Kept, args: argparse.Namespace) -> None:
    """All that is not yet in the file; sizes and numbers of ranks by turns."""
    done = {(part["what"], part["name"], part["turn"]) for part in kept.parts}
    for turn, name, ranks in itertools.product(range(args.turns), args.sizes, args.ranks):
        sizes, part = SIZES[name], {"name": f"{name} {ranks}", "turn": turn}
        if ("seen", *part.values()) not in done:
            kept.go_on()
            kept.add("seen", **part, times=run_ranks(worker, ranks, sizes, args.repeat))
        if turn == 0 and ("planned", *part.values()) not in done:
            kept.go_on()
            kept.add("planned", **part, times=plan(sizes, ranks, measured(ranks, "fp32", sizes.width)))


def verdict(ranks: int, speedup: float) -> str:
    """Whether that many ranks pay."""
    return "yes" if speedup >= enough(ranks) else "no"


HEADER = ["model", "ranks", "ms/step", "planned", "speedup", "planned", "communication", "planned"]


def report(kept: Kept, args: argparse.Namespace) -> tuple[str, bool]:
    """The table, and whether all verdicts agree."""
    lines, agree = [], True
    for name in args.sizes:
        base, simulated = turns(kept, f"{name} 1"), foreseen(kept, f"{name} 1")
        for ranks in args.ranks:
            seen, planned = turns(kept, f"{name} {ranks}"), foreseen(kept, f"{name} {ranks}")
            together = [times.together for times in seen]
            cells = [stat([1e3 * each for each in together]).text(), f"{1e3 * planned.step:,.0f}"]
            if ranks == 1:
                lines.append([name, "1", *cells, *["-"] * 6])
                continue
            faster = stat([ranks * one.together / each for one, each in zip(base, together, strict=True)])
            ways = [faster.median, ranks * simulated.step / planned.step]
            longer = statistics.median(max(0.0, 1 - times.alone / times.together) for times in seen)
            shares = [longer, planned.share]
            verdicts = [verdict(ranks, each) for each in ways]
            same = len({*verdicts}) == 1
            agree = agree and same
            cells += [faster.text(2), *(f"{each:.2f}" for each in ways[1:]), *(f"{each:.0%}" for each in shares)]
            lines.append([name, str(ranks), *cells, " / ".join(verdicts), "yes" if same else "NO"])
    return f"{machine_line()}\n\n{table([*HEADER, 'pays', 'agree'], lines)}", agree


def turns(kept: Kept, name: str) -> list[Times]:
    """What was seen in each."""
    return [Times(*part["times"]) for part in kept.of("seen") if part["name"] == name]


def foreseen(kept: Kept, name: str) -> Foreseen:
    """What was planned."""
    return next(Foreseen(*part["times"]) for part in kept.of("planned") if part["name"] == name)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="whether more ranks pay, measured and planned")
    parser.add_argument("--kept", type=Path, required=True, help="file of the parts that are done")
    parser.add_argument("--seconds", type=float, default=1e6, help="after which a call begins no further part")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="the first one is 1")
    parser.add_argument("--repeat", type=int, default=6, help="timed steps of a turn")
    parser.add_argument("--turns", type=int, default=3, help="runs of each")
    args = parser.parse_args()
    if args.ranks[:1] != [1] or args.repeat < 1:
        parser.error("--ranks wants 1 first, --repeat at least 1")
    return args


def main() -> int:
    args = parse()
    kept = Kept(args.kept, args.seconds)
    measure(kept, args)
    text, agree = report(kept, args)
    print(text)
    about = "# Does parallel pay?\n\nWritten by `python benchmarks/pays.py`.\n" + __doc__.split("\n\n")[2] + LIMITS
    (Path(__file__).parent / "pays.md").write_text(f"{about}\n\n{text}\n", encoding="utf-8")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
