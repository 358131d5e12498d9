"""What activations cost: bytes and time of recomputation, the tiled loss, and the longest sequence that fits.

    python benchmarks/activations.py
    python benchmarks/activations.py --parts loss longest --budget 512

One rank. A policy that this version of zero does not know is left out, with the reason.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from live import LiveBytes
from measure import machine_line, paired, rotated, stat, table
from torch import Tensor
from torch.nn import functional as F
from variants import ADAMW, Setup

import zero
from zero.config import load
from zero.sizes.model_trace import trace
from zero.tiled.slices import default_size

MIB = 2**20
NO_ROOM = 3  # the exit code of a probe that found too little memory
GRAIN = 64  # lengths of sequences are multiples of it
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def recompute(policy: str, **more: Any) -> dict[str, Any]:
    return {"zero": {"recompute": {"modules": ["Block"], "policy": policy, **more}}}


@dataclass(frozen=True)
class Case:
    """What the JSON says beyond the plain run, the policy in the words of a plan, and whether the loss is tiled."""

    title: str
    policy: str
    settings: dict[str, Any] = field(default_factory=dict)
    tiled: bool = False


HOST = {**recompute("full"), "activation_checkpointing": {"cpu_checkpointing": True}}
CASES = {
    "none": Case("none", "none"),
    "selective": Case("selective", "selective", recompute("selective")),
    "selective2": Case("selective, every second", "selective", recompute("selective", products=2)),
    "full": Case("full", "full", recompute("full")),
    "host": Case("full + host", "host", HOST),
}
LONGEST = {
    **{name: CASES[name] for name in ("none", "selective", "full", "host")},
    "none+tiled": Case("none + tiled", "none", tiled=True),
    "full+tiled": Case("full + tiled", "full", recompute("full"), tiled=True),
    "host+tiled": Case("full + host + tiled", "host", HOST, tiled=True),
}


class Memory(NamedTuple):
    """Bytes beyond what lived before the step: kept by one block, kept after the forward, and the most at any time."""

    block: float
    forward: int
    peak: int


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="measure what activations cost in bytes and time")
    parser.add_argument(
        "--parts", nargs="+", choices=("blocks", "loss", "longest"), default=["blocks", "loss", "longest"]
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each policy")
    parser.add_argument("--repeat", type=int, default=2, help="timed steps in a turn")
    parser.add_argument("--budget", type=int, default=512, help="MiB for one step, for the longest sequence")
    parser.add_argument("--most", type=int, default=32768, help="no longer sequence than this is tried")
    sizes = {"width": 384, "layers": 8, "heads": 6, "vocab": 2048, "context": 512, "batch": 2}
    loss = {"loss-vocab": 50_304, "loss-tokens": 2048, "loss-width": 512}
    for name, size in {**sizes, **loss}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--probe", nargs=2, metavar=("CASE", "LENGTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.rounds, args.repeat, args.budget) < 1 or args.layers < 2:
        parser.error("--rounds, --repeat and --budget want at least 1, --layers at least 2")
    return args


def make_engine(case: Case, setup: Setup) -> Any:
    """The example's GPT under an engine. Raises ConfigError where this version does not know the policy."""
    model = setup.model()
    model.loss = zero.tiled_cross_entropy if case.tiled else None
    return zero.initialize(model=model, config=config_of(case, setup))[0]


def config_of(case: Case, setup: Setup) -> dict[str, Any]:
    """The JSON."""
    return {
        "train_micro_batch_size_per_gpu": setup.batch,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "bf16": {"enabled": setup.bf16},
        "zero_optimization": {"stage": 0},
        **case.settings,
    }


def planned(case: Case, setup: Setup) -> float:
    """The bytes that a block keeps, as `zero plan` has them."""
    with torch.device("meta"):
        model = setup.model()
    cost = trace(model, setup.data(0, 0), load(config_of(case, setup), 1), DEVICE.type)
    return setup.batch * next(unit.saved[case.policy] for unit in cost.units if unit.recomputable)


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def data(setup: Setup, step: int) -> list[Tensor]:
    return [part.to(DEVICE) for part in setup.data(step, 0)]


def step(engine: Any, batch: list[Tensor]) -> float:
    """Seconds of one step."""
    wait()
    start = time.perf_counter()
    engine.backward(engine(*batch))
    engine.step()
    wait()
    return time.perf_counter() - start


class Meter:
    """Bytes that live on the device: by torch's allocator on a GPU, by counting storages on a CPU."""

    def __enter__(self) -> Meter:
        self._live = None if DEVICE.type == "cuda" else LiveBytes().__enter__()
        if self._live is None:
            torch.cuda.reset_peak_memory_stats()
        self._before = 0 if self._live is not None else torch.cuda.memory_allocated()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def now(self) -> int:
        return (torch.cuda.memory_allocated() if self._live is None else self._live.now) - self._before

    def peak(self) -> int:
        return (torch.cuda.max_memory_allocated() if self._live is None else self._live.peak) - self._before


def memory(engine: Any, batch: list[Tensor]) -> Memory:
    """Of one untimed step. A block keeps what is there when the next one begins and was not when it did."""
    blocks, marks = engine.module.blocks, []
    with Meter() as meter:
        hooks = [block.register_forward_pre_hook(lambda *_: marks.append(meter.now())) for block in blocks]
        loss = engine(*batch)
        forward = meter.now()
        engine.backward(loss)
        peak = meter.peak()
    for hook in hooks:
        hook.remove()
    engine.step()
    last = len(blocks) - 1
    # A recomputation may have added marks behind those of the forward.
    return Memory((marks[last] - marks[0]) / last, forward, peak)


def blocks_part(args: argparse.Namespace) -> str:
    """Bytes and times of all policies, interleaved."""
    setup = Setup(args.width, args.layers, args.heads, args.vocab, args.context, args.batch, args.dtype == "bf16")
    engines, left_out = {}, []
    for name, case in CASES.items():
        try:
            engines[name] = make_engine(case, setup)
        except zero.ConfigError as error:
            left_out.append(f"- {case.title}: {str(error).splitlines()[-1].strip()}")
    times: dict[str, list[list[float]]] = defaultdict(list)
    for turn in range(args.rounds):
        for name in rotated(list(engines), turn):
            first = turn * (args.repeat + 1)
            taken = [step(engines[name], data(setup, first + each)) for each in range(args.repeat + 1)]
            times[name].append(taken[1:])
    found = {name: memory(engine, data(setup, 10**6)) for name, engine in engines.items()}
    text = (
        f"{args.layers} blocks of width {args.width}, {args.batch} x {args.context} tokens, vocabulary {args.vocab}, "
        f"{args.dtype}, {DEVICE.type}; {args.rounds} rounds x {args.repeat} steps\n\n"
    )
    return text + blocks_table(setup, times, found) + ("\n\nLeft out:\n\n" + "\n".join(left_out) if left_out else "")


def blocks_table(setup: Setup, times: dict[str, list[list[float]]], found: dict[str, Memory]) -> str:
    # The median of a turn, so that turns can be taken in pairs.
    turns = {name: [stat(turn).median for turn in rounds] for name, rounds in times.items()}
    header = ["", "KiB kept per block", "planned", "of none", "MiB kept by forward", "peak", "ms/step", "of none"]
    rows = []
    for name, seen in found.items():
        rows.append(
            [
                CASES[name].title,
                f"{seen.block / 1024:,.1f}",
                f"{planned(CASES[name], setup) / 1024:,.1f}",
                f"{seen.block / found['none'].block:.3f}",
                f"{seen.forward / MIB:.1f}",
                f"{seen.peak / MIB:.1f}",
                stat([1e3 * each for turn in times[name] for each in turn]).text(),
                paired(turns[name], turns["none"]).text(3),
            ]
        )
    return table(header, rows) + extra_time(turns)


def extra_time(turns: dict[str, list[float]]) -> str:
    """What each policy adds to the time of a step, as a share of what full recomputation adds."""
    if "full" not in turns:
        return ""
    full = stat([one - other for one, other in zip(turns["full"], turns["none"], strict=True)]).median
    lines = []
    for name in turns.keys() - {"none", "full"}:
        own = stat([one - other for one, other in zip(turns[name], turns["none"], strict=True)]).median
        lines.append(f"- {CASES[name].title}: {own / full:.2f} of the time that full adds")
    return "\n\n" + "\n".join(sorted(lines)) if lines else ""


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def loss_part(args: argparse.Namespace) -> str:
    """The tiled loss beside the plain one, forward and backward."""
    tokens, vocabulary, width = args.loss_tokens, args.loss_vocab, args.loss_width
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, device=DEVICE).mul_(0.02).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
    losses = {"plain": plain_loss, "tiled": zero.tiled_cross_entropy}

    def run(name: str) -> float:
        hidden.grad = weight.grad = None
        wait()
        start = time.perf_counter()
        losses[name](hidden, weight, targets).backward()
        wait()
        return time.perf_counter() - start

    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(args.rounds):
        for name in rotated(list(losses), turn):
            run(name)
            seconds[name].append(stat([run(name) for _ in range(args.repeat)]).median)
    peaks = {}
    for name in losses:
        hidden.grad = weight.grad = None
        with Meter() as meter:
            losses[name](hidden, weight, targets).backward()
            peaks[name] = meter.peak()
    rows = min(default_size(tokens, width, DEVICE.type == "cuda"), tokens)
    lines = [
        [
            name,
            f"{peaks[name] / MIB:,.0f}",
            f"{peaks[name] / peaks['plain']:.3f}",
            stat([1e3 * each for each in seconds[name]]).text(),
            paired(seconds[name], seconds["plain"]).text(3),
        ]
        for name in losses
    ]
    text = f"{tokens} tokens of width {width}, vocabulary {vocabulary:,}, {args.dtype}, slices of {rows} tokens\n\n"
    return text + table(["", "MiB at the peak", "of plain", "ms", "of plain"], lines)


def longest_part(args: argparse.Namespace) -> str:
    """For each policy, the longest sequence of which one training step fits into the budget."""
    rows, left_out, found = [], [], {}
    for name, case in LONGEST.items():
        try:
            make_engine(case, Setup(24, 1, 2, 8, 8, 1, args.dtype == "bf16")).destroy()
        except zero.ConfigError as error:
            left_out.append(f"- {case.title}: {str(error).splitlines()[-1].strip()}")
            continue
        found[name] = longest(args, name)
        times = found[name] / found["none"] if found["none"] else float("nan")
        more = "at least " if found[name] >= args.most else ""
        rows.append([case.title, f"{more}{found[name]:,}", f"{times:.2f}"])
    text = (
        f"{args.layers} blocks of width {args.width}, one sequence, vocabulary {args.loss_vocab:,}, {args.dtype}: "
        f"{args.budget} MiB for all that a step needs beyond weights, gradients and optimizer\n\n"
    )
    text += table(["", "longest sequence, tokens", "of none"], rows)
    return text + ("\n\nLeft out:\n\n" + "\n".join(left_out) if left_out else "")


def longest(args: argparse.Namespace, name: str) -> int:
    """Doubles the length while it fits, then halves the gap until it is below 3 %; 0 if nothing fits."""
    low, high = 0, 4 * GRAIN
    while high <= args.most and fits(args, name, high):
        low, high = high, 2 * high
    high = min(high, args.most + GRAIN)
    while high - low > max(GRAIN, low // 32):
        middle = (low + high) // 2 // GRAIN * GRAIN
        low, high = (middle, high) if fits(args, name, middle) else (low, middle)
    return low


def fits(args: argparse.Namespace, name: str, length: int) -> bool:
    """Whether a process of its own trains one step on a sequence of this length."""
    sizes = {key: getattr(args, key) for key in ("width", "layers", "heads", "loss_vocab", "budget", "dtype")}
    options = [text for key, value in sizes.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    command = [sys.executable, str(Path(__file__)), "--probe", name, str(length), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # What does not go through torch's allocator ends the process when there is no memory for it.
    if done.returncode not in (0, NO_ROOM) and "bad_alloc" not in done.stderr:
        raise RuntimeError(f"a probe of {name} at {length} tokens ended with {done.returncode}:\n{done.stderr}")
    return done.returncode == 0


def probe(args: argparse.Namespace) -> int:
    """One step on a short sequence, so that all state is there; then, inside the budget, one on the long one."""
    torch.set_num_threads(1)
    name, length = args.probe[0], int(args.probe[1])
    sizes = (args.width, args.layers, args.heads, args.loss_vocab)
    engine = make_engine(LONGEST[name], Setup(*sizes, length, 1, args.dtype == "bf16"))
    step(engine, data(Setup(*sizes, GRAIN, 1, False), 0))
    batch = data(Setup(*sizes, length, 1, False), 1)
    limit(args.budget * MIB)
    try:
        step(engine, batch)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
            return NO_ROOM
        raise
    return 0


def limit(nbytes: int) -> None:
    """Let this process take so many bytes more than it has."""
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + nbytes) / total))
        return
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    taken = 1024 * int(status["VmData"].split()[0]) + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (taken, taken))


def main() -> int:
    args = parse()
    if args.probe:
        return probe(args)
    print(machine_line())
    for name, part in {"blocks": blocks_part, "loss": loss_part, "longest": longest_part}.items():
        if name in args.parts:
            print(f"\n{part(args)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
