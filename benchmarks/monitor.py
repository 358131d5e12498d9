"""What monitors, the run folder and the norms of units cost in a step: on and off by turns in one engine.

    python benchmarks/monitor.py

One process group, and one engine for each size of model, so that what is compared has the same weights, buffers and
messages: only where its step tells what it has done is exchanged. Blocks of steps go on, off, off, on. Four of them
give one difference, of which the median stands with a bootstrap interval of 95 %. A block ends when the thread that
writes has written all of it, so that its work counts as if it hid behind nothing. Wall time is the slowest rank's, CPU
time that of all threads. `off` beside `off` shows what such a difference is worth.

The tiny model trains in one process and its step is short, so that microseconds can be seen; the example's is that of
examples/gpt on `--ranks` ranks. What comes rarely, a look at the memory each second and files each 5 seconds, would
come more often by turns than it does in a run, so it is left out of them and timed alone. So are the passes over a
rank's shard that norms of units take, and what a step calls where all is off.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import machine_line, run_ranks, table
from variants import gpt

import zero
import zero.engine.recorder
import zero.monitor.monitor
from zero.config import load
from zero.engine.description import run_facts
from zero.engine.unit_norms import UnitNorms
from zero.monitor.monitor import Monitor
from zero.monitor.step_record import Line

SHAPES = {"tiny": gpt.Shape(width=16, layers=4, heads=2, context=8), "example": gpt.Shape()}
BATCH = {"tiny": 1, "example": 8}
WARMUP = 8  # steps, after the fifth of which a report has its timeline
RARE = 1e6  # seconds


class Counts(NamedTuple):
    """How much is measured: steps of a block, and fours of blocks."""

    steps: int
    fours: int


class Interval(NamedTuple):
    """A median, and between which two it is with 95 %."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 0, unit: str = "") -> str:
        return f"{self.median:,.{digits}f}{unit} [{self.low:,.{digits}f} to {self.high:,.{digits}f}]"

    def times(self, factor: float) -> Interval:
        return Interval(*(factor * each for each in self))


def bootstrap(values: Sequence[float], draws: int = 4000) -> Interval:
    """Of the median."""
    drawn = torch.tensor(values, dtype=torch.float64)
    picked = torch.randint(len(values), (draws, len(values)), generator=torch.Generator().manual_seed(0))
    low, high = drawn[picked].median(dim=1).values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(statistics.median(values), low, high)


class Written(Line):
    """Told last in a block: sets an event when it is its turn to be written, behind all that was told before."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "reached", threading.Event())

    def line(self) -> None:
        self.reached.set()


class Switch:
    """Turns on of one engine what a variant has, and off again."""

    def __init__(self, engine: Any, keys: Mapping[str, Any], common: Mapping[str, Any]) -> None:
        settings, training = load({**common, **keys}, dist.get_world_size()), engine._training
        self._training, self._optimizer = training, engine.optimizer
        self.monitor = Monitor(engine._sharded.world.watchdog.status)
        self.monitor.open(settings, lambda: run_facts(engine), 1)
        every = settings.zero.unit_norms
        self.norms = UnitNorms(engine._sharded, engine.optimizer, every) if every else None
        self.profiles = training.profiles if settings.zero.report is not None else None

    def on(self) -> None:
        """Into the step."""
        self._training.recorder.monitor, self._training.recorder._norms = self.monitor, self.norms
        self._optimizer.around_updates(None if self.norms is None else self.norms.of)
        self._training.profiles = self.profiles

    def drain(self) -> None:
        """Wait until all is written."""
        if self.monitor.enabled:
            written = Written()
            self.monitor.tell(written)
            written.reached.wait()


def variants(folder: str, size: str) -> dict[str, dict[str, Any]]:
    """The keys of each; one by one where a step is short enough to see them."""
    job = {"enabled": True, "output_path": folder}
    sinks = {"csv_monitor": {"csv_monitor": job}}
    if importlib.util.find_spec("tensorboard") is not None:
        sinks["tensorboard"] = {"tensorboard": job}
    everything = {key: section for each in sinks.values() for key, section in each.items()}
    report = {"zero": {"report": f"{folder}/report"}}
    apart = {**sinks, "report (JSON lines)": report} if size == "tiny" else {}
    return {
        "off": {},
        **apart,
        "monitors and report": {**everything, **report},
        "unit norms": {"zero": {"unit_norms": True}},
        "all": {**everything, "zero": {"report": f"{folder}/all", "unit_norms": True}},
    }


class Found(NamedTuple):
    """Seconds of a step when off, and those more that each variant takes: on the clock, in CPU time; of calls alone."""

    step: float
    cpu: float
    more: dict[str, list[float]]
    more_cpu: dict[str, list[float]]
    calls: float
    rare: float
    norms: float


def reduced(values: Sequence[float], op: Any) -> list[float]:
    """Over ranks; collective."""
    out = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(out, op=op)
    return out.tolist()


def measure(rank: int, size: str, counts: Counts) -> Found:
    """All variants of one size."""
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    common = {
        "train_micro_batch_size_per_gpu": BATCH[size],
        "steps_per_print": float("inf"),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    }
    torch.manual_seed(0)
    config = {**common, "zero": {"report": f"{folder[0]}/first"}}
    engine, *_ = zero.initialize(model=gpt.GPT(SHAPES[size]), config=config)
    tokens = torch.randint(gpt.VOCAB, (BATCH[size], SHAPES[size].context + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def block(switch: Switch, steps: int) -> tuple[float, float]:
        switch.on()
        dist.barrier()
        cpu, begin = time.process_time(), time.perf_counter()
        for _ in range(steps):
            engine.backward(engine(*batch))
            engine.step()
        switch.drain()
        return (time.perf_counter() - begin) / steps, (time.process_time() - cpu) / steps

    flushes = zero.monitor.monitor._FLUSH_EVERY
    zero.monitor.monitor._FLUSH_EVERY = zero.engine.recorder._MEMORY_EVERY = RARE
    switches = {name: Switch(engine, keys, common) for name, keys in variants(folder[0], size).items()}
    off = Switch(engine, {}, common)
    first = Switch(engine, {"zero": {"report": f"{folder[0]}/second"}}, common)
    block(first, WARMUP)
    for switch in switches.values():
        block(switch, counts.steps)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in switches}
    for _ in range(counts.fours):
        for name, switch in switches.items():
            taken[name] += [block(each, counts.steps) for each in (switch, off, off, switch)]
    calls = alone(lambda: _calls(off, engine._recorder))
    walls = {name: reduced([wall for wall, _ in each], dist.ReduceOp.MAX) for name, each in taken.items()}
    cpus = {name: reduced([cpu for _, cpu in each], dist.ReduceOp.SUM) for name, each in taken.items()}
    step, cpu = (statistics.median(_off(each)) for each in (walls, cpus))
    flush = switches["all"].monitor._writer._flush
    flush()
    block(switches["all"], round(flushes / step))  # what is left to be written then
    rare = alone(engine._recorder._nbytes, 100) + alone(flush, 1) / flushes
    passes = functools.partial(_norms, switches["unit norms"].norms, engine._sharded.trained)
    norms = statistics.median(alone(passes, 1) for _ in range(50))
    for switch in (*switches.values(), first):
        switch.monitor.close()
    off.on()
    engine.destroy()
    return Found(step, cpu, _differences(walls), _differences(cpus), calls, rare, norms)


def _off(taken: Mapping[str, Sequence[float]]) -> list[float]:
    return [value for each in taken.values() for at, value in enumerate(each) if at % 4 in (1, 2)]


def _differences(taken: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """(on + on - off - off) / 2 of each four."""
    fours = {name: [each[at : at + 4] for at in range(0, len(each), 4)] for name, each in taken.items()}
    return {name: [(a - b - c + d) / 2 for a, b, c, d in each] for name, each in fours.items()}


def alone(call: Callable[[], Any], count: int = 10_000) -> float:
    """Seconds of one."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def _norms(norms: Any, units: Sequence[Any]) -> None:
    """As in a step."""
    norms.take(0)
    for unit in units:
        with norms.of(unit, unit.shard.master.values()):
            pass
    norms.take(1)


def _calls(off: Switch, recorder: Any) -> None:
    """What a step of one micro-batch calls of it."""
    off.on()
    for phase in ("forward", "backward", "step"):
        with recorder.phase(phase):
            pass
    recorder.conclude(recorder.step_ended(0), {})


def report(size: str, found: Found, ranks: int, counts: Counts) -> str:
    """The table of a size."""
    rows = []
    for name, more in found.more.items():
        wall, cpu = bootstrap(more), bootstrap(found.more_cpu[name])
        cells = [wall.times(1e6).text(), wall.times(100 / found.step).text(2)]
        rows.append([name, *cells, cpu.times(1e6 / ranks).text(), cpu.times(100 / found.cpu).text(2)])
    header = ["", "us more a step", "% of a step", "us more of CPU time, per rank", "% of its CPU time"]
    about = (
        f"{size}: {1e3 * found.step:.2f} ms a step when off, {1e3 * found.cpu / ranks:.2f} ms of CPU time on each of "
        f"{ranks} rank(s); {counts.fours} fours of blocks of {counts.steps} steps"
    )
    rare = (
        f"All off: {1e6 * found.calls:.1f} us of calls in a step, {found.calls / found.step:.4%} of it. What comes "
        f"rarely, with all on: {1e6 * found.rare:,.0f} us each second, {found.rare:.2%}. Norms of units alone: "
        f"{1e6 * found.norms:,.0f} us, {found.norms / found.step:.2%} of a step."
    )
    return "\n\n".join([about, table(header, rows), rare])


def together(tiny: Found, example: Found) -> str:
    """The tiny model's microseconds in the example's step, with the passes over the example's shards."""
    told, every = (bootstrap(tiny.more[name]) for name in ("monitors and report", "all"))
    percent, passes = 100 / example.step, example.norms - tiny.norms
    whole = Interval(*(each + passes for each in every)).times(percent)
    return (
        f"In the example's step of {1e3 * example.step:.0f} ms the microseconds of monitors and report, as seen at "
        f"the tiny model, are {told.times(percent).text(2)} %, and {whole.text(2)} % with norms of units at each "
        f"step, whose passes over the shards are the example's. What comes rarely adds "
        f"{100 * example.rare:.2f} %. Wanted: at most 1 %."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--fours", type=int, nargs=2, default=[20, 4], metavar=("TINY", "EXAMPLE"))
    parser.add_argument("--steps", type=int, nargs=2, default=[5, 2], metavar=("TINY", "EXAMPLE"))
    args = parser.parse_args()
    every = {size: Counts(*each) for size, *each in zip(SHAPES, args.steps, args.fours, strict=True)}
    counts = {size: every[size] for size in args.sizes}
    worlds = {"tiny": 1, "example": args.ranks}
    parts = [machine_line()]
    print(parts[0], flush=True)
    found = {}
    for size, each in counts.items():
        found[size] = run_ranks(measure, worlds[size], size, each)
        parts.append(report(size, found[size], worlds[size], each))
        print(f"\n{parts[-1]}", flush=True)
    if set(args.sizes) == set(SHAPES):
        parts.append(together(found["tiny"], found["example"]))
        print(f"\n{parts[-1]}")
        about = "# What monitors cost\n\nWritten by `python benchmarks/monitor.py`.\n" + __doc__.split("\n\n", 2)[2]
        text = "\n\n".join([about.strip(), *parts])
        (Path(__file__).parent / "monitor.md").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
