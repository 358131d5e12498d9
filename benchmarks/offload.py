"""Step time with state off the device: each placement beside no offload, FSDP2's and DeepSpeed's, and a prediction.

    python benchmarks/offload.py                          # a small model on this machine
    python benchmarks/offload.py --dtype bf16 --nvme /mnt/drive
    python benchmarks/offload.py --h200                   # on one H200: 1.42B and 6.9B, with the targets

Every turn of a variant runs in processes of its own, so that its memory is its own; turns of all variants alternate.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from measure import Stat, machine_line, rotated, run_ranks, slowest, stat, table
from offload_disk import disk_rates
from offload_prediction import Rates, measure, unit_times
from offload_variants import OURS, TITLES, Sizes, absent, make

from zero.memory.available import host_threads
from zero.plan.formats import ITEMSIZE
from zero.plan.memory import Scheme
from zero.sizes.step_time import DEVICE, DOWN, DRIVE, HOST, UP, Prediction, predict

GIB = 2**30
SIZES = {"width": 512, "layers": 8, "heads": 8, "vocab": 2048, "context": 256, "batch": 2}
BILLION = {"width": 2048, "layers": 24, "heads": 16, "vocab": 50304, "context": 1024, "batch": 8}  # 1.42B
LARGE = {"width": 4096, "layers": 32, "heads": 32, "vocab": 50304, "context": 1024, "batch": 8}  # 6.9B
ON_H200 = ("none2", "cpu2", "cpu2-8bit", "auto2", "none3", "cpu3", "fsdp2", "ds2", "ds3")
TARGETS = {"cpu2": 480.0, "cpu2-8bit": 330.0, "cpu3": 600.0}  # ms per step of 1.42B on one H200
PEAK = 19.6  # GiB of the device, DeepSpeed's stage 2 with the optimizer on the CPU
BYTES = 12.0  # per parameter on the host, for 6.9B


class Work(NamedTuple):
    """Of one of ours: what the prediction is made from."""

    plans: Sequence[Any]
    scheme: Scheme
    rank: int
    rates: Rates
    norm: float


class Turn(NamedTuple):
    """Seconds of each step and of its parts, the maximum over ranks, and what one rank held.

    step: from the start of one forward to that of the next; update: the host's part of one step, beside the loop.
    """

    step: list[float]
    forward: list[float]
    backward: list[float]
    end: list[float]
    update: float
    peak: float  # bytes of the device
    host: float  # bytes of the process at most
    off: int  # bytes of state off the device, as planned
    loss: float
    numel: int
    work: Work | None


class Clock:
    """Points in time of the device, for which nobody has to wait."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if not self._cuda:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def seconds(self, stride: int, offset: int, span: int) -> list[float]:
        """From each mark `offset` of every `stride` to the one `span` later."""
        starts = range(offset, len(self.marks) - span, stride)
        pairs = [(self.marks[at], self.marks[at + span]) for at in starts]
        if self._cuda:
            torch.cuda.synchronize()
            return [begun.elapsed_time(ended) / 1e3 for begun, ended in pairs]
        return [ended - begun for begun, ended in pairs]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="time a training step with state off the device")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--moments", choices=("fp32", "bf16", "8bit"), default="fp32")
    parser.add_argument("--nvme", metavar="FOLDER", help="a folder on the drive to be measured")
    parser.add_argument("--recompute", action="store_true", help="keep no activations of blocks")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--repeat", type=int, default=4, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps in a turn before those")
    parser.add_argument("--variants", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--h200", action="store_true", help="1.42B and 6.9B in bf16, and whether the targets are met")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    if min(args.rounds, args.repeat, args.ranks) < 1 or args.warmup < 1:
        parser.error("--rounds, --repeat, --warmup and --ranks want at least 1")
    return args


def turn(rank: int, name: str, sizes: Sizes, warmup: int, repeat: int) -> Turn:
    """Train for a few steps; one rank's part."""
    variant = make(name, sizes)
    if sizes.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock, loss = Clock(sizes.device), None
    for step in range(warmup + repeat + 1):  # the last one only ends the one before it
        batch = sizes.batch_of(step, rank)
        if step == warmup and name in OURS:
            variant.update.busy.clear()
        clock.mark()
        loss = variant.forward(*batch)
        clock.mark()
        variant.backward(loss)
        clock.mark()
        variant.step()
    variant.settle()
    clock.mark()
    steps, forward, backward, end = (
        slowest(clock.seconds(3, offset, span)[warmup : warmup + repeat])
        for offset, span in ((0, 3), (0, 1), (1, 1), (2, 1))
    )
    peak = torch.cuda.max_memory_allocated() if sizes.device == "cuda" else 0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    numel = sum(param.numel() for param in sizes.made("meta").parameters())
    update = sum(variant.update.busy) / (repeat + 1) if name in OURS else 0.0
    update, peak, host = slowest([update, peak, host])
    off, work = work_of(variant, sizes, rank) if name in OURS else (0, None)
    variant.close()
    return Turn(steps, forward, backward, end, update, peak, host, off, loss.item(), numel, work)


def work_of(variant: Any, sizes: Sizes, rank: int) -> tuple[int, Work | None]:
    """Bytes off the device, and what a prediction needs, measured beside the model that was just trained."""
    sharded = variant.engine._sharded
    if sharded.offload is None:
        return 0, None
    variant.backward(variant.forward(*sizes.batch_of(0, rank)))
    if sizes.device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    variant.norm()
    norm = time.perf_counter() - begun
    formats = sharded.numerics.formats
    rates = measure(torch.device(sizes.device), sizes.dtype, formats, host_threads())
    if sizes.folder is not None:
        read, write = disk_rates(sizes.folder)
        rates = rates._replace(read=read, write=write)
    offload = sharded.offload
    plans, own = [unit.plan for unit in sharded.units], sharded.units[0].mesh.shard.rank
    return offload.host.memory + offload.host.files, Work(plans, offload.scheme, own, rates, norm)


def predicted(work: Work, base: Sequence[Turn], device: str) -> Prediction:
    """The step from bytes and rates, with the forward and backward of the run without offload."""
    forward, backward = (stat([value for one in base for value in getattr(one, part)]).median for part in PARTS)
    times = unit_times(work.plans, work.scheme, work.rank, work.rates, forward, backward)
    # On a CPU both work on the same cores and the same memory.
    same = (DRIVE,) if device == "cuda" else (DRIVE, (DEVICE, HOST))
    return predict(times, work.norm, same=same)


PARTS = ("forward", "backward")
HEADER = [
    *("", "ms/step", "to none", "fwd", "bwd", "step()", "norm", "update beside", "down", "up", "wait"),
    *("predicted", "measured / predicted", "device GiB", "host GiB", "off, B/param", "last loss"),
]


def ms(turns: Sequence[Turn], part: str) -> Stat:
    return stat([1e3 * value for one in turns for value in getattr(one, part)])


def row(name: str, turns: Sequence[Turn], base: Sequence[Turn], sizes: Sizes) -> list[str]:
    """One line of the table; `base`: the turns without offload, perhaps none."""
    total, last = ms(turns, "step"), turns[-1]
    cells = [TITLES[name], total.text(), f"{total.median / ms(base, 'step').median:.2f}" if base else "-"]
    cells += [f"{ms(turns, part).median:,.0f}" for part in (*PARTS, "end")]
    if last.work is None or not base:
        cells += ["-"] * 7
    else:
        found = predicted(last.work, base, sizes.device)
        wait = sum(max(0.0, ms(turns, part).median - ms(base, part).median) for part in PARTS)
        down, up = (1e3 * found.busy[stream] for stream in (DOWN, UP))
        update = stat([1e3 * one.update for one in turns]).median
        numbers = (1e3 * last.work.norm, update, down, up, wait, 1e3 * found.step)
        cells += [f"{number:,.0f}" for number in numbers]
        cells.append(f"{total.median / (1e3 * found.step):.2f}")
    peak = f"{last.peak / GIB:.1f}" if sizes.device == "cuda" else "-"
    off = f"{last.off / last.numel:.2f}" if last.off else "-"
    return [*cells, peak, f"{last.host / GIB:.1f}", off, f"{last.loss:.6f}"]


def rates(one: Turn) -> str:
    """What the machine was measured to do in this turn."""
    found, formats, itemsize = one.work.rates, one.work.scheme.formats, ITEMSIZE[one.work.plans[0].dtype]
    # Gradient read; parameter, what is kept beside it for its exact value, and moments read and written.
    dtype = one.work.plans[0].dtype
    moments = formats.moments_nbytes(1 << 20) / (1 << 20)
    each = itemsize + 2 * (itemsize + ITEMSIZE.get(formats.master_dtype(dtype), 0) + moments)
    return (
        f"the host updates {found.host_update / 1e6:,.0f}M parameters/s ({found.host_update * each / 1e9:.0f} GB/s, "
        f"{each:.1f} B each); the device {found.device_update / 1e6:,.0f}M; copies {found.down / 1e9:.1f} GB/s down, "
        f"{found.up / 1e9:.1f} up; the drive {found.read / 1e9:.2f} read, {found.write / 1e9:.2f} written "
        "(inf: there is nothing to copy, or it was not measured)"
    )


def compare(args: argparse.Namespace, names: Sequence[str], sizes: Sizes) -> dict[str, list[Turn]]:
    """Turns of all variants, alternating, and the table of them; what cannot run here is named below it."""
    missing = {name: absent(name, sizes) for name in names}
    runs, notes = [name for name in names if missing[name] is None], []
    notes += [f"{TITLES[name]}: {why}" for name, why in missing.items() if why is not None]
    turns: dict[str, list[Turn]] = {name: [] for name in runs}
    for index in range(args.rounds):
        for name in rotated(runs, index):
            if name not in turns:
                continue  # it has failed before
            try:
                found = run_ranks(turn, args.ranks, name, sizes, args.warmup, args.repeat, gpu=sizes.device == "cuda")
            except Exception as error:  # killed for memory, for one; the others go on
                notes.append(f"{TITLES[name]}: failed: {str(error).strip().splitlines()[-1]}")
                del turns[name]
            else:
                turns[name].append(found)
    rows = [row(name, found, turns.get(f"none{name[-1]}" if name != "cpu2-8bit" else "none2", []), sizes)
            for name, found in turns.items()]  # fmt: skip
    if rows:
        numel = next(iter(turns.values()))[0].numel
        print(
            f"\n{numel / 1e6:,.1f}M parameters, {args.ranks} rank(s), batch {sizes.batch} x {sizes.context} per rank, "
            f"{'bf16' if sizes.bf16 else 'fp32'}, moments in {sizes.moments}; {args.rounds} rounds x {args.repeat} "
            f"steps (+ {args.warmup} warm-up), median [min-max]\n"
        )
        print(table(HEADER, rows) + "\n")
    told = {name: found[-1] for name, found in turns.items() if found[-1].work is not None}
    notes = [*(f"{TITLES[name]}: {rates(one)}" for name, one in told.items()), *notes]
    print("".join(f"\n- {note}" for note in notes), flush=True)
    return turns


def targets(turns: dict[str, list[Turn]]) -> None:
    """Whether what was aimed at on an H200 is met."""
    rows = []
    for name, limit in TARGETS.items():
        if name in turns:
            median = ms(turns[name], "step").median
            rows.append([TITLES[name], f"{median:,.0f} ms", f"{limit:,.0f} ms", "yes" if median <= limit else "NO"])
    if "cpu2" in turns:
        peak = max(one.peak for one in turns["cpu2"]) / GIB
        rows.append([f"{TITLES['cpu2']}: peak", f"{peak:.1f} GiB", f"{PEAK} GiB", "yes" if peak <= PEAK else "NO"])
    print("\n" + table(["", "measured", "target", "met"], rows))


def on_h200(args: argparse.Namespace) -> None:
    """All figures of one H200: 1.42B by placement and peer, then whether 6.9B trains on a host of 128 GiB."""
    targets(compare(args, ON_H200, Sizes(*BILLION.values(), True, "cuda", args.moments, args.nvme)))
    args.rounds = 1
    large = Sizes(*LARGE.values(), True, "cuda", "bf16", args.nvme, True)
    for one in compare(args, ["cpu2"], large).get("cpu2", []):
        each = one.off / one.numel
        print(f"\n6.9B trains: {each:.2f} bytes per parameter on the host; at most {BYTES}: "
              f"{'yes' if each <= BYTES else 'NO'}")  # fmt: skip


def main() -> None:
    args = parse()
    print(machine_line())
    if args.h200:
        if not torch.cuda.is_available():
            raise SystemExit("--h200 needs a GPU; without it the same program measures a small model on the CPU")
        on_h200(args)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = [getattr(args, name) for name in SIZES]
    compare(args, args.variants, Sizes(*shape, args.dtype == "bf16", device, args.moments, args.nvme, args.recompute))


if __name__ == "__main__":
    main()
