"""Time of the CUDA kernels beside a plain copy, and beside torch's fused AdamW, on one GPU in one run.

    python benchmarks/kernels_cuda.py --numel 1000000000

First it checks results against the plain torch reference, and stops if one is off. Then every entry takes its turn in
each round, in rotating order; times are taken with CUDA events around --repeat launches.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import NamedTuple

import torch
from measure import Stat, machine_line, rotated, stat, table

from zero.kernels import cuda
from zero.kernels.formulas import Adagrad, Adam, Formula, Lion, Sgd
from zero.kernels.moments import Moment
from zero.kernels.norm import sum_squares, sum_squares_into, sum_squares_reference
from zero.kernels.step import step
from zero.optim.outcome import step_factor

ADAM, LION, MOMENTUM, ADAGRAD = Adam(1e-3, weight_decay=0.1), Lion(1e-4), Sgd(0.1, 0.9), Adagrad(0.1)
COPY, TORCH = "copy (torch, fp32)", "torch AdamW(fused), fp32"


class Entry(NamedTuple):
    """One thing to time: what a call moves, and a function that makes the call. Holds its tensors alive."""

    nbytes: int  # read and written per parameter
    call: Callable[[], object]


class Layout(NamedTuple):
    """How a shard is stored."""

    formula: Formula
    remainder: bool
    moments: str
    grad: torch.dtype
    param: torch.dtype | None


LAYOUTS = {
    "AdamW, fp32 master, fp32 moments, fp32 grads": Layout(ADAM, False, "fp32", torch.float32, None),
    "AdamW, fp32 master, fp32 moments, bf16": Layout(ADAM, False, "fp32", torch.bfloat16, torch.bfloat16),
    "AdamW, remainder, fp32 moments, bf16": Layout(ADAM, True, "fp32", torch.bfloat16, torch.bfloat16),
    "AdamW, remainder, bf16 moments, bf16": Layout(ADAM, True, "bf16", torch.bfloat16, torch.bfloat16),
    "AdamW, remainder, 8bit moments, bf16": Layout(ADAM, True, "8bit", torch.bfloat16, torch.bfloat16),
    "Lion, remainder, 8bit moments, bf16": Layout(LION, True, "8bit", torch.bfloat16, torch.bfloat16),
    "SGD with momentum, fp32": Layout(MOMENTUM, False, "fp32", torch.float32, None),
    "Adagrad, fp32": Layout(ADAGRAD, False, "fp32", torch.float32, None),
}


class Shard:
    """The tensors of a layout on a device, with small random gradients."""

    def __init__(self, layout: Layout, numel: int, device: torch.device) -> None:
        self.formula = layout.formula
        self.master = torch.zeros(numel, dtype=torch.int16 if layout.remainder else torch.float32, device=device)
        signs = layout.formula.signed
        self.moments = tuple(Moment.filled(numel, layout.moments, device=device, signed=sign) for sign in signs)
        self.grad = torch.empty(numel, dtype=layout.grad, device=device).normal_(0, 1e-2)
        self.param = None if layout.param is None else torch.zeros(numel, dtype=layout.param, device=device)
        self.factor = torch.ones((), dtype=torch.float64, device=device)
        self.count = 0

    @property
    def tensors(self) -> tuple:
        return self.master, self.moments, self.grad, self.param

    @property
    def step_bytes(self) -> float:
        """Per parameter: gradient read; master and moments, and beside a remainder the parameter, read and written."""
        numel = self.master.numel()
        twice = self.master.nbytes + sum(moment.nbytes for moment in self.moments)
        once = self.grad.nbytes
        if self.param is not None:
            twice, once = (twice + self.param.nbytes, once) if self.master.dtype == torch.int16 else (
                twice, once + self.param.nbytes
            )  # fmt: skip
        return (2 * twice + once) / numel

    def step(self) -> None:
        self.count += 1
        step(self.formula, *self.tensors, step=self.count, grad_scale=self.factor)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="time the CUDA kernels beside a copy and torch's fused AdamW")
    parser.add_argument("--numel", type=int, default=1_000_000_000, help="parameters of a shard")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=5, help="calls in a turn")
    return parser.parse_args()


def check(device: torch.device) -> None:
    """Raise unless small cases give the reference's results on this GPU."""
    for name, layout in LAYOUTS.items():
        ours, theirs = (Shard(layout, 300_001, device) for _ in range(2))
        theirs.grad.copy_(ours.grad)
        for count in range(1, 4):
            ours.step()
            step(layout.formula, *theirs.tensors, step=count, grad_scale=1.0, compiled=False)
        for mine, its in ((ours.master, theirs.master), (ours.param, theirs.param)):
            if mine is not None and not torch.equal(mine, its):
                raise RuntimeError(f"{name}: differs from the reference; nothing was timed")
    x = torch.randn(300_001, device=device)
    if abs(sum_squares(x) / sum_squares_reference(x) - 1) > 1e-12:
        raise RuntimeError("sum of squares: differs from the reference; nothing was timed")


def timed(call: Callable[[], object], repeat: int) -> float:
    """Milliseconds of one call on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeat


def copy_entry(args: argparse.Namespace, device: torch.device) -> Entry:
    a, b = (torch.zeros(args.numel, device=device) for _ in range(2))
    return Entry(8, lambda: b.copy_(a))


def torch_entry(args: argparse.Namespace, device: torch.device) -> Entry:
    param = torch.nn.Parameter(torch.zeros(args.numel, device=device))
    param.grad = torch.empty_like(param).normal_(0, 1e-2)
    return Entry(28, torch.optim.AdamW([param], lr=1e-3, weight_decay=0.1, fused=True).step)


def norm_entry(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Entry:
    x = torch.ones(args.numel, dtype=dtype, device=device)
    out = torch.zeros(1, dtype=torch.float64, device=device)
    return Entry(x.element_size(), lambda: sum_squares_into(x, out))


def step_entry(args: argparse.Namespace, device: torch.device, layout: Layout) -> Entry:
    shard = Shard(layout, args.numel, device)
    return Entry(shard.step_bytes, shard.step)


def phase_entry(args: argparse.Namespace, device: torch.device, layout: Layout) -> Entry:
    """Norm, factor, step: all that a rank does between the reduction of gradients and the next gather."""
    shard = Shard(layout, args.numel, device)
    total = torch.zeros((), dtype=torch.float64, device=device)

    def phase() -> None:
        sum_squares_into(shard.grad, total)
        shard.factor = step_factor(total.sqrt(), 1.0, 1.0, True)
        shard.step()

    return Entry(shard.step_bytes + shard.grad.element_size(), phase)


def entries(args: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], Entry]]:
    """All there is to time, made when its turn comes: together they would not fit."""
    bf16 = LAYOUTS["AdamW, remainder, 8bit moments, bf16"]
    made: dict[str, Callable[[], Entry]] = {
        COPY: lambda: copy_entry(args, device),
        TORCH: lambda: torch_entry(args, device),
    }
    for name, layout in LAYOUTS.items():
        made[f"step: {name}"] = lambda layout=layout: step_entry(args, device, layout)
    for dtype in (torch.float32, torch.bfloat16):
        made[f"norm: {dtype}"] = lambda dtype=dtype: norm_entry(args, device, dtype)
    made["phase: remainder, 8bit, bf16"] = lambda: phase_entry(args, device, bf16)
    return made


def rows(nbytes: dict[str, float], times: dict[str, list[float]], numel: int) -> list[list[str]]:
    copied = [8e-6 * numel / ms for ms in times[COPY]]

    def share(name: str) -> Stat:
        speeds = [1e-6 * nbytes[name] * numel / ms for ms in times[name]]
        return stat([100 * speed / copy for speed, copy in zip(speeds, copied, strict=True)])

    return [
        [
            name,
            f"{nbytes[name]:.2f}",
            stat(values).text(3),
            stat([1e-6 * nbytes[name] * numel / ms for ms in values]).text(),
            share(name).text(),
        ]
        for name, values in times.items()
    ]


def main() -> None:
    args = parse()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    if cuda.kernels(device) is None:
        raise RuntimeError(f"{device} does not run the CUDA kernels")
    check(device)
    makers = entries(args, device)
    nbytes: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(args.rounds):
        for name in rotated(list(makers), turn):
            entry = makers[name]()
            nbytes[name] = entry.nbytes
            timed(entry.call, 2)
            times[name].append(timed(entry.call, args.repeat))
            del entry
            gc.collect()
    print(f"{torch.cuda.get_device_name(device)}, {args.numel:,} parameters; {machine_line()}\n")
    header = ["", "bytes/param", "ms", "GB/s", "% of the copy"]
    print(table(header, rows(nbytes, times, args.numel)))


if __name__ == "__main__":
    main()
