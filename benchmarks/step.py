"""Step time of zero's four stages beside DDP, DDP + ZeroRedundancyOptimizer and FSDP2, interleaved in one run.

    python benchmarks/step.py --ranks 2 --dtype fp32

Every rank holds all variants, each with its own copy of the same model, and all see the same data. In a round each
variant takes its turn of --warmup and --repeat steps; the order rotates from round to round. With --gpu each rank has a
GPU, and the time of a part ends when the GPU has done it; what all variants hold must fit on it at the same time.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from measure import SOCKETS, Stat, bytes_written, machine_line, paired, rotated, run_ranks, slowest, stat, table
from variants import PEERS, TITLES, Setup, Variant, make


class Times(NamedTuple):
    """Seconds of one step, each the maximum over ranks."""

    total: float
    forward: float
    backward: float
    update: float


class Cost(NamedTuple):
    """Of one more step, untimed: the most bytes of state on any rank, and the bytes that rank's sockets sent."""

    after_backward: float
    after_step: float
    sent: float


class Result(NamedTuple):
    """All that was seen of one variant."""

    rounds: list[list[Times]]  # [round][step], warm-up steps left out
    losses: list[float]  # of every step, warm-up included: the mean over ranks
    cost: Cost
    numel: int
    note: str


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="time a training step of zero beside torch's own data parallelism")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each rank, over NCCL")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant")
    parser.add_argument("--repeat", type=int, default=3, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=1, help="steps in a turn before those")
    parser.add_argument("--variants", nargs="+", choices=TITLES, default=list(TITLES))
    for name, size in {"width": 512, "layers": 8, "heads": 8, "vocab": 2048, "context": 256, "batch": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    if min(args.rounds, args.repeat, args.ranks) < 1 or args.warmup < 0:
        parser.error("--rounds, --repeat and --ranks want at least 1, --warmup at least 0")
    args.variants = list(dict.fromkeys(args.variants))
    return args


def one_step(variant: Variant, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[Times, float]:
    """Run a step that all ranks start together; returns its times and the loss, averaged over ranks."""
    dist.barrier()
    marks = [now()]
    loss = variant.forward(*batch)
    marks.append(now())
    variant.backward(loss)
    marks.append(now())
    variant.step()
    marks.append(now())
    parts = [after - before for before, after in pairwise(marks)]
    return Times(*slowest([marks[-1] - marks[0], *parts])), mean(loss)


def now() -> float:
    """Seconds, when what was asked of the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def mean(loss: torch.Tensor) -> float:
    value = loss.detach().double()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def cost_of_step(variant: Variant, batch: tuple[torch.Tensor, torch.Tensor]) -> Cost:
    dist.barrier()
    sent = bytes_written()
    variant.backward(variant.forward(*batch))
    after_backward = variant.nbytes()
    variant.step()
    return Cost(*slowest([after_backward, variant.nbytes(), bytes_written() - sent]))


def worker(rank: int, args: argparse.Namespace) -> dict[str, Result]:
    """One rank's part of the run; the results are the same on all."""
    setup = Setup(args.width, args.layers, args.heads, args.vocab, args.context, args.batch, args.dtype == "bf16")
    variants = {name: make(name, setup) for name in args.variants}
    rounds: dict[str, list[list[Times]]] = defaultdict(list)
    losses: dict[str, list[float]] = defaultdict(list)
    for turn in range(args.rounds):
        for name in rotated(args.variants, turn):
            times = []
            for _ in range(args.warmup + args.repeat):
                measured, loss = one_step(variants[name], setup.data(len(losses[name]), rank))
                times.append(measured)
                losses[name].append(loss)
            rounds[name].append(times[args.warmup :])
    numel = sum(param.numel() for param in setup.model().parameters())
    batch = setup.data(0, rank)
    return {
        name: Result(rounds[name], losses[name], cost_of_step(variant, batch), numel, variant.note)
        for name, variant in variants.items()
    }


def milliseconds(result: Result, part: str) -> Stat:
    return stat([1e3 * getattr(times, part) for turn in result.rounds for times in turn])


def step_table(results: dict[str, Result], itemsize: int) -> str:
    header = [
        "",
        "ms/step",
        "fwd",
        "bwd",
        "opt",
        "B/param after bwd",
        "after step",
        "sent, Psi",
        "last loss",
        "off DDP",
    ]
    reference = results.get("ddp")
    rows = []
    for name, result in results.items():
        cost, psi = result.cost, itemsize * result.numel
        apart = "-"
        if reference is not None and name != "alone":  # alone trains on other gradients
            apart = f"{max(abs(a - b) for a, b in zip(result.losses, reference.losses, strict=True)):.0e}"
        row = [
            TITLES[name] + (f" ({result.note})" if result.note else ""),
            milliseconds(result, "total").text(),
            *(f"{milliseconds(result, part).median:,.0f}" for part in ("forward", "backward", "update")),
            f"{cost.after_backward / result.numel:.2f}",
            f"{cost.after_step / result.numel:.2f}",
            f"{cost.sent / psi:.2f}" if SOCKETS.exists() else "not counted",
            f"{result.losses[-1]:.6f}",
            apart,
        ]
        rows.append(row)
    return table(header, rows)


def ratio_table(results: dict[str, Result]) -> str:
    """Each stage against its peer: the ratio of the two medians of a round, and the median of that over rounds."""
    rows = []
    for name, peer in PEERS.items():
        if name not in results or peer not in results:
            continue
        ours, theirs = (
            [stat([times.total for times in turn]).median for turn in results[key].rounds] for key in (name, peer)
        )
        rows.append([TITLES[name], TITLES[peer], paired(ours, theirs).text(3)])
    return table(["", "against", "step time, ratio"], rows) if rows else ""


def main() -> None:
    args = parse()
    results = run_ranks(worker, args.ranks, args, gpu=args.gpu)
    first, backend = next(iter(results.values())), "NCCL" if args.gpu else "gloo"
    print(machine_line())
    print(
        f"\n{first.numel / 1e6:.1f}M parameters (Psi), {args.ranks} {backend} ranks of 1 thread, batch {args.batch} x "
        f"{args.context} per rank, {args.dtype}; {args.rounds} rounds x {args.repeat} steps (+ {args.warmup} warm-up), "
        f"median [min-max]; last loss after {len(first.losses)} equal steps, "
        "off DDP: the most that the loss of any step differed\n"
    )
    print(step_table(results, 2 if args.dtype == "bf16" else 4))
    print(f"\n{ratio_table(results)}")


if __name__ == "__main__":
    main()
