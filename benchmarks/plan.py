"""Is what `zero plan` says what happens? 24 configurations on two ranks: bytes by kind, the peak, bytes sent, time.

    python benchmarks/plan.py
    python benchmarks/plan.py --rows 3 7 --no-time

Writes the table into benchmarks/plan.md, unless rows are named.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from live import LiveBytes
from measure import machine_line, run_ranks, slowest, stat, table
from variants import ADAMW
from variants import Setup as Sizes

import zero
from zero.config import load
from zero.engine.reality import Observed, alive_now
from zero.sizes.choice import own_choice
from zero.sizes.estimate import DeviceBytes
from zero.sizes.model_trace import trace
from zero.sizes.rates import DEVICES, Rates
from zero.tools.plan.rank_rates import flops_of, measure, middle, one_pass, recomputing
from zero.tools.plan.search import Search, Setup

RANKS = 2
SIZES = Sizes(width=256, layers=6, heads=4, vocab=512, context=128, batch=4, bf16=False)
WARMUP, REPEAT = 2, 6  # steps of a row that are not timed, and that are
STATE = DeviceBytes._fields[:6]  # kinds that are there without a micro-batch
LIMITS = {"kinds": 0.03, "peak": 0.05, "sent": 0.01, "time": 0.2}


class Row(NamedTuple):
    """One configuration."""

    stage: int
    optimizer: str = "none"
    params: str = "none"
    policy: str = "none"
    bf16: bool = False
    accumulation: int = 1

    @property
    def sizes(self) -> Sizes:
        """Of the model and its batch."""
        return dataclasses.replace(SIZES, bf16=self.bf16)

    @property
    def dtype(self) -> str:
        """That the model computes in."""
        return "bf16" if self.bf16 else "fp32"

    def __str__(self) -> str:
        places = ["" if at == "none" else f"{what} {at}" for what, at in zip("OP", self[1:3], strict=True)]
        words = [str(self.stage), *places, self.policy, self.dtype, f"x{self.accumulation}"]
        return " ".join(word for word in words if word not in ("", "none"))

    def settings(self, folder: str) -> dict[str, Any]:
        """The JSON; what rests on a drive is in files in `folder`."""
        section: dict[str, Any] = {"stage": self.stage}
        for name, device in (("offload_optimizer", self.optimizer), ("offload_param", self.params)):
            if device != "none":
                section[name] = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
        if self.stage == 3:
            section |= {"stage3_prefetch_bucket_size": 1_000_000, "stage3_param_persistence_threshold": 0}
        settings = {
            "train_micro_batch_size_per_gpu": SIZES.batch,
            "gradient_accumulation_steps": self.accumulation,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
            "bf16": {"enabled": self.bf16},
            "zero_optimization": section,
        }
        if self.policy != "none":
            settings["zero"] = {"recompute": {"modules": ["Block"], "policy": self.policy}}
        return settings


class Bytes(NamedTuple):
    """Of one step on one rank: the most of each kind, kept by the forward, the most of all tensors, elsewhere, sent."""

    kinds: tuple[int, ...]
    kept: int
    peak: int
    host: int
    drive: int
    sent: int


class Seen(NamedTuple):
    """Bytes, and seconds of each timed step, the maximum over ranks; and the rates that were measured before."""

    nbytes: Bytes
    seconds: list[float]
    rates: Rates


class Meter(LiveBytes):
    """The most bytes of all tensors after any operation, beyond what was there before.

    Parameters that are gathered take memory in the same storages again, so that they are asked for.
    """

    def __init__(self, engine: Any) -> None:
        self._units = [unit for unit in engine._sharded.units if unit.resharded]
        super().__init__([unit.buffer.full for unit in self._units])
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.now + sum(unit.buffer.full.untyped_storage().nbytes() for unit in self._units))
        return made


def step(engine: Any, batches: list[Any]) -> None:
    """One optimizer step."""
    for batch in batches:
        engine.backward(engine(*batch))
        engine.step()


def observe(engine: Any, batches: list[Any]) -> Bytes:
    """What one step takes, which is not the first."""
    sharded, kept = engine._sharded, 0
    for unit in sharded.trained:
        unit.shard.settle()  # what the step before still sends is not of this one
    gc.collect()
    at_rest, sent = sum(alive_now(sharded, engine.optimizer)), sharded.world.watchdog.status.sent
    with Observed(sharded, engine.optimizer) as observed, Meter(engine) as meter:
        for batch in batches:
            start = meter.now
            loss = engine(*batch)
            kept = max(kept, meter.now - start)
            engine.backward(loss)
            del loss
            engine.step()
        for unit in sharded.trained:
            unit.shard.settle()
    sent = sharded.world.watchdog.status.sent - sent
    host = engine.host_nbytes()
    away = (0, 0) if host is None else (host.memory, host.files)
    return Bytes(observed.most[: len(STATE)], kept, at_rest + meter.most, *away, sent)


def try_row(rank: int, row: Row, folder: str, rates: Rates | None = None) -> Seen:
    """Train under it; collective. rates: of the machine, but for the model's FLOP/s; None for bytes only."""
    engine, *_ = zero.initialize(model=row.sizes.model(), config=row.settings(folder))
    batches = [row.sizes.data(step, rank) for step in range(row.accumulation)]
    for _ in range(WARMUP):
        step(engine, batches)
    nbytes, seconds = observe(engine, batches), []
    if rates:
        cpu = torch.device("cpu")
        module, turn = one_pass(row.dtype, SIZES.width, cpu, lambda: (row.sizes.model(), row.sizes.data(0, 0)))
        seconds, speed = timed(engine, batches, turn, flops_of(turn))
        again = {row.dtype: recomputing(module, turn, cpu)} if row.policy != "none" else {}
        rates = dataclasses.replace(rates, flops={row.dtype: speed}, recompute=again)
    engine.destroy()
    return Seen(nbytes, seconds, rates or DEVICES["h100"])


def timed(engine: Any, batches: list[Any], turn: Callable[[], None], flops: int) -> tuple[list[float], float]:
    """Seconds of steps, each behind another one; and the FLOP/s of the model, from turns between them; collective."""
    seconds, passes = [], []
    for _ in range(REPEAT):
        for what, found in ((partial(step, engine, batches), seconds), (turn, passes)):
            what()
            dist.barrier()
            begin = time.perf_counter()
            what()
            found.append(time.perf_counter() - begin)
            engine.optimizer.settle()
    return slowest(seconds), flops / statistics.median(slowest(passes))


def of_ranks(own: Any) -> list[Any]:
    """What each rank has, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def worker(rank: int, rows: list[Row], folder: str, with_times: bool) -> list[Seen]:
    """All rows, one after the other."""
    rates = Rates(name="measured", **middle(of_ranks(measure("bf16", SIZES.width)))) if with_times else None
    return [try_row(rank, row, folder, rates) for row in rows]


class Planned(NamedTuple):
    """What was said before."""

    nbytes: Bytes
    seconds: float


def plan(row: Row, folder: str, rates: Rates) -> Planned:
    """As `zero plan` does it, for the same configuration."""
    with torch.device("meta"):
        model = row.sizes.model()
    settings = load(row.settings(folder), RANKS, filled=False)
    cost = trace(model, row.sizes.data(0, 0), settings, "cpu")
    found = Search(Setup(model, cost, settings, rates, RANKS, False), own_choice(settings)).row(row.policy, SIZES.batch)
    kept = cost.activations(row.policy, SIZES.batch) + SIZES.batch * cost.logits_saved
    kinds = tuple(found.device[: len(STATE)])
    away = found.host.memory, found.host.files
    nbytes = Bytes(kinds, round(kept), round(found.peak), *away, round(found.links.sent))
    return Planned(nbytes, found.step.step)


HEADER = ["", *STATE, "activations", "peak", "host", "drive", "sent", "ms/step", "planned", "wrong"]


def cell(planned: float, seen: float, digits: int = 2) -> str:
    """MB as planned, and by how much reality differs."""
    if not planned and not seen:
        return "-"
    off = seen / planned - 1 if planned else float("inf")
    return f"{planned / 1e6:,.{digits}f} {off:+.1%}"


def wrong(planned: Planned, seen: Seen) -> list[str]:
    """What is outside of the limits."""

    def beyond(limit: str, one: float, other: float) -> bool:
        return abs(other - one) > LIMITS[limit] * max(one, 1)

    mine, theirs = planned.nbytes, seen.nbytes
    names = [*STATE, "activations", "host", "drive"]
    ours, real = ((*each.kinds, each.kept, each.host, each.drive) for each in (mine, theirs))
    found = [name for name, *pair in zip(names, ours, real, strict=True) if beyond("kinds", *pair)]
    found += ["peak"] if beyond("peak", mine.peak, theirs.peak) else []
    found += ["sent"] if beyond("sent", mine.sent, theirs.sent) else []
    timed = seen.seconds and beyond("time", 1e6 * planned.seconds, 1e6 * stat(seen.seconds).median)
    return found + (["time"] if timed else [])


def line(row: Row, planned: Planned, seen: Seen) -> list[str]:
    """Of the table."""
    mine, theirs = planned.nbytes, seen.nbytes
    pairs = [*zip(mine.kinds, theirs.kinds, strict=True), *zip(mine[1:], theirs[1:], strict=True)]
    foretold = f"{1e3 * planned.seconds:,.0f}" if seen.seconds else "-"
    return [
        str(row),
        *(cell(*pair) for pair in pairs),
        stat([1e3 * each for each in seen.seconds]).text() if seen.seconds else "-",
        foretold,
        ", ".join(wrong(planned, seen)) or "-",
    ]


ROWS = [
    *(Row(stage, bf16=bf16, accumulation=count) for stage in range(4) for bf16 in (False, True) for count in (1, 2)),
    Row(2, policy="selective"),
    Row(3, policy="full"),
    Row(1, policy="full", bf16=True, accumulation=2),
    Row(1, "cpu"),
    Row(2, "cpu", policy="selective", accumulation=2),
    Row(3, "cpu", "cpu", policy="full", bf16=True),
    Row(1, "nvme", bf16=True, accumulation=2),
    Row(3, "nvme", "nvme"),
]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="compare what zero plan says with what happens")
    parser.add_argument("--rows", type=int, nargs="+", choices=range(len(ROWS)), default=[], help="only these")
    parser.add_argument("--no-time", action="store_true", help="bytes only")
    return parser.parse_args()


ABOUT = """# Plan against reality

Written by `python benchmarks/plan.py`: the example's GPT of {numel:,} parameters ({layers} blocks of width {width},
{batch} x {context} tokens in a micro-batch of a rank) on {ranks} gloo ranks of one thread, with AdamW. Each cell has MB
(1e6 bytes) on rank 0 as planned, and by how much reality differs. A row: the stage, where optimizer state (O) and
parameters (P) rest if not on the device, recomputation, dtype, micro-batches for a step.

What is real: kinds of model state, the most of each whenever a unit began to travel (`zero.engine.reality.Observed`);
activations, what the forward left for the backward; the peak, the most bytes of all tensors after any operation
(`benchmarks/live.py`); sent, the engine's count of what left the process. Time is the median of {repeat} steps, that
of the slower rank; the plan's is from rates that `zero.tools.plan.rank_rates` measured on the same ranks, the model's
FLOP/s in turns between those steps, and what recomputing it takes: this machine is shared, and its speed changes by a
quarter within seconds.

The last column names what is further off than it may be: kinds 3 %, the peak 5 %, sent 1 %, time 20 %.
"""


def main() -> int:
    args = parse()
    rows = [ROWS[index] for index in args.rows] or ROWS
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(worker, RANKS, rows, folder, not args.no_time)
        plans = [plan(row, folder, seen.rates) for row, seen in zip(rows, found, strict=True)]
    lines = [line(*each) for each in zip(rows, plans, found, strict=True)]
    text = f"{machine_line()}\n\n{table(HEADER, lines)}"
    print(text)
    if not args.rows:
        numel = sum(param.numel() for param in SIZES.model().parameters())
        about = ABOUT.format(numel=numel, ranks=RANKS, repeat=REPEAT, **dataclasses.asdict(SIZES))
        (Path(__file__).parent / "plan.md").write_text(f"{about}\n{text}\n", encoding="utf-8")
    return 1 if any(wrong(*each) for each in zip(plans, found, strict=True)) else 0


if __name__ == "__main__":
    sys.exit(main())
